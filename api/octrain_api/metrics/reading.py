"""Points and buckets of series, read from blocks and rollups as few bytes as will do."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from octrain_api.metrics import summary
from octrain_api.metrics.catalogue import Catalogue, Names, read_catalogue
from octrain_api.metrics.codec import Directory, Floats, Rows, unpack_band
from octrain_api.metrics.lookup import BlockFacts, Facts, MetricLookup, SeriesFacts, Slice
from octrain_api.metrics.rollups import BUCKET, level_for, place_of, width_for
from octrain_api.metrics.summary import Summary

Key = tuple[str, str, int]
# Cells of blocks that one answer may be made of: bounds its memory.
MAX_CELLS = 8_000_000


class TooMuch(ValueError):
    """The answer would hold too many points."""


@dataclass(frozen=True)
class Query:
    """What is asked for. `since` gives for each job the batch number after which to begin."""

    names: Names
    attempt: int | None = None
    from_step: int = 0
    to_step: int | None = None
    since: dict[str, int] = field(default_factory=dict)
    # At most so many buckets; None for the points themselves.
    buckets: int | None = None
    # A series of at most so many points is given by its points all the same.
    max_points: int = 0


@dataclass(frozen=True)
class Line:
    """One series: its points, or its buckets where `width` says how wide they are."""

    job_id: str
    name: str
    attempt: int
    width: int
    # Of each bucket its first step; of each point its step. In order.
    steps: Any
    summary: Summary
    # Whether each element is one point.
    exact: bool

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class _Part:
    """What one block holds of one series."""

    key: Key
    block: BlockFacts
    column: int
    # Steps from here on are a newer attempt's.
    cut: int | None
    # Whether every step of the block counts.
    whole: bool
    # Its buckets: their level, what their rows share, and their data; None for its points.
    level: int | None = None
    row_data: bytes = b""
    data: bytes = b""


class MetricReader:
    """Answers queries by one lookup."""

    def __init__(self, lookup: MetricLookup) -> None:
        self._lookup = lookup

    async def read(self, query: Query, known: Facts) -> list[Line]:
        """Series by job, name and attempt: what a newer attempt has begun to repeat is cut from
        the older ones. The facts are those of the query's jobs, names and steps. Errors: TooMuch.
        """
        catalogue = await read_catalogue(self._lookup, query.names, known)
        facts = catalogue.facts
        if query.attempt is not None:
            facts = {key: one for key, one in facts.items() if key[2] == query.attempt}
        cuts = _cuts(facts)
        facts = {key: one for key, one in facts.items() if _in_range(one, cuts.get(key), query)}
        if not facts:
            return []
        width = 1
        if query.buckets is not None:
            first = max(min(one.first_step for one in facts.values()), query.from_step)
            last = max(one.last_step for one in facts.values())
            last = last if query.to_step is None else min(last, query.to_step)
            width = width_for(first, max(first, last), query.buckets)
        parts = _parts(query, catalogue, facts, cuts)
        if not any(query.since.values()):
            await self._take_buckets(
                [part for part in parts if part.whole or not part.block.raw], level_for(width)
            )
        gone = [part for part in parts if part.level is None and not part.block.raw]
        await self._take_what_is_left(gone, width)
        parts = [part for part in parts if part.level is not None or part.block.raw]
        cells = sum(part.block.rows for part in parts if part.level is None)
        if cells > MAX_CELLS:
            raise TooMuch(
                f"This is up to {cells} points, more than the {MAX_CELLS} that one answer holds."
            )
        loaded = await self._load(query, parts)
        lines = (_line(key, loaded.get(key, []), width, query) for key in sorted(facts))
        return [line for line in lines if line is not None]

    async def _take_buckets(self, parts: Sequence[_Part], level: int | None) -> None:
        """Give the parts their buckets at a level, where their blocks have them."""
        if level is None:
            return
        found = await self._lookup.buckets(
            level, [part.block.id for part in parts], [part.column for part in parts]
        )
        for place, (row_data, data) in found.items():
            part = parts[place]
            part.level, part.row_data, part.data = level, row_data, data

    async def _take_what_is_left(self, gone: Sequence[_Part], width: int) -> None:
        """Where the points are gone: the coarsest level that fits, or the finest that there is."""
        has = await self._lookup.levels(list({part.block.id for part in gone}))
        chosen: defaultdict[int, list[_Part]] = defaultdict(list)
        for part in gone:
            levels = [
                level
                for level, places in has.get(part.block.id, [])
                if place_of(places, part.column) >= 0
            ]
            level = level_for(width, levels) or min(levels, default=None)
            if level is not None:
                chosen[level].append(part)
        for level, of_level in chosen.items():
            await self._take_buckets(of_level, level)

    async def _load(
        self, query: Query, parts: Sequence[_Part]
    ) -> dict[Key, list[tuple[Summary, bool]]]:
        """Of each series what its blocks hold, in the order of recording, and whether as points."""
        raw = [part for part in parts if part.level is None]
        rows = await self._lookup.rows(list({part.block.id for part in raw}))
        wanted: dict[tuple[int, int], Slice] = {}
        band_of: dict[int, int] = {}
        for part in raw:
            directory = rows[part.block.id][1]
            band = int(directory.bands_of(np.array([part.column]))[0])
            band_of[id(part)] = band
            wanted[part.block.id, band] = Slice(part.block.id, *directory.place(band))
        data = await self._lookup.slices(list(wanted.values()))
        values = _Bands(dict(zip(wanted, data, strict=True)))
        of_key: defaultdict[Key, list[_Part]] = defaultdict(list)
        for part in parts:
            of_key[part.key].append(part)
        found: defaultdict[Key, list[tuple[Summary, bool]]] = defaultdict(list)
        for key, own in of_key.items():
            for level, group in groupby(own, key=lambda part: part.level):
                run = list(group)
                if level is not None:
                    found[key].append((_buckets(run, query, level), False))
                    continue
                for part in run:
                    points, of = values.points(part, band_of[id(part)], *rows[part.block.id])
                    found[key].append((_within(points, query, part, of), True))
        return found


def _parts(
    query: Query, catalogue: Catalogue, facts: dict[Key, SeriesFacts], cuts: dict[Key, int]
) -> list[_Part]:
    """What the blocks may hold of the series, in the order of recording."""
    parts: list[_Part] = []
    end = query.to_step
    for block in catalogue.blocks:
        if block.last_seq <= query.since.get(block.job_id, 0):
            continue
        if block.last_step < query.from_step or (end is not None and block.first_step > end):
            continue
        inside = block.first_step >= query.from_step and (end is None or block.last_step <= end)
        for column, name in catalogue.columns[block.layout_id]:
            key = (block.job_id, name, block.attempt)
            cut = cuts.get(key)
            if key not in facts or (cut is not None and block.first_step >= cut):
                continue
            whole = inside and (cut is None or block.last_step < cut)
            parts.append(_Part(key, block, column, cut, whole))
    return parts


def _buckets(run: Sequence[_Part], query: Query, level: int) -> Summary:
    """The buckets with points of one series in blocks that follow each other.

    Only where the points are gone may a bucket be but partly in the range; it is then kept, and
    where a newer attempt begins in it, the older one's part as well.
    """
    rows = np.frombuffer(b"".join(part.row_data for part in run), dtype=BUCKET)
    begin = rows["first"]
    data = b"".join(part.data for part in run)
    buckets = summary.load(data, begin, rows["time"], rows["tokens"])
    keep = buckets.count > 0
    keep &= begin + level > query.from_step
    if query.to_step is not None:
        keep &= begin <= query.to_step
    cut = run[0].cut
    if cut is not None:
        keep &= begin < cut
    return buckets if keep.all() else buckets.take(keep)


class _Bands:
    """Columns out of bands, each band decompressed once."""

    def __init__(self, data: dict[tuple[int, int], bytes]) -> None:
        self._data = data
        self._unpacked: dict[tuple[int, int], tuple[Floats, Any]] = {}

    def points(
        self, part: _Part, band: int, rows: Rows, directory: Directory
    ) -> tuple[Summary, Rows]:
        """The points of a part, a bucket each, and their rows."""
        key = (part.block.id, band)
        columns = directory.columns(band)
        if key not in self._unpacked:
            self._unpacked[key] = unpack_band(
                self._data[key], len(columns), len(rows), part.block.masked
            )
        values, present = self._unpacked[key]
        column = part.column - columns.start
        if present is None:
            return summary.of_points(values[column], None, rows), rows
        where = present[column]
        own = rows[where]
        return summary.of_points(values[column][where], None, own), own


def _within(points: Summary, query: Query, part: _Part, rows: Rows) -> Summary:
    steps = points.last_at
    keep = steps >= query.from_step
    if query.to_step is not None:
        keep &= steps <= query.to_step
    if part.cut is not None:
        keep &= steps < part.cut
    since = query.since.get(part.block.job_id, 0)
    if part.block.first_seq <= since:
        keep &= rows.seqs > since
    return points if keep.all() else points.take(keep)


def _cuts(facts: dict[Key, SeriesFacts]) -> dict[Key, int]:
    """For each series the first step that a newer attempt has of it."""
    cuts: dict[Key, int] = {}
    first_newer: dict[tuple[str, str], int] = {}
    for key in sorted(facts, key=lambda k: -k[2]):
        name = key[:2]
        if name in first_newer:
            cuts[key] = first_newer[name]
        first = facts[key].first_step
        first_newer[name] = min(first, first_newer.get(name, first))
    return cuts


def _in_range(facts: SeriesFacts, cut: int | None, query: Query) -> bool:
    if facts.last_step < query.from_step or (cut is not None and facts.first_step >= cut):
        return False
    return query.to_step is None or facts.first_step <= query.to_step


def _line(key: Key, parts: list[tuple[Summary, bool]], width: int, query: Query) -> Line | None:
    parts = [(part, exact) for part, exact in parts if len(part.count)]
    if not parts:
        return None
    whole = summary.concatenate([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
    exact = all(exact for _, exact in parts)
    if query.buckets is not None and not (exact and len(whole.count) <= query.max_points):
        keys, buckets = summary.sum_up(whole, whole.last_at // width)
        return Line(*key, width, keys * width, buckets, exact=False)
    steps = whole.last_at
    if len(steps) > 1 and np.any(steps[1:] < steps[:-1]):
        order = np.argsort(steps, kind="stable")
        steps, whole = steps[order], whole.take(order)
    return Line(*key, 1, steps, whole, exact)
