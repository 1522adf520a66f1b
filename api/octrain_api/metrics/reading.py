"""Points and buckets of series, read from blocks and rollups as few bytes as will do."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from octrain_api.metrics import summary
from octrain_api.metrics.catalogue import Names, SeriesFacts, read_catalogue
from octrain_api.metrics.codec import Directory, Floats, Rows, unpack_band
from octrain_api.metrics.repository import MetricRepository, Slice
from octrain_api.metrics.rollups import BUCKET, extent, level_for, place_of, width_for
from octrain_api.metrics.summary import Summary

Key = tuple[str, str, int]
# Cells of blocks that one answer may be made of: bounds its memory.
MAX_CELLS = 8_000_000


class TooMuch(ValueError):
    """The answer would hold too many points."""


@dataclass(frozen=True)
class Query:
    """What is asked for. `since` gives for each job the batch number after which to begin."""

    job_ids: Sequence[str]
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
    block: Any
    column: int
    # Steps from here on are a newer attempt's.
    cut: int | None
    level: int | None = None
    place: int = 0
    buckets: int = 0
    row_data: bytes = b""


class MetricReader:
    """Answers queries over one session."""

    def __init__(self, repository: MetricRepository) -> None:
        self._repository = repository

    async def read(self, query: Query) -> list[Line]:
        """Series by job, name and attempt: what a newer attempt has begun to repeat is cut from
        the older ones. Errors: TooMuch.
        """
        facts = await read_catalogue(self._repository, query.job_ids, query.names)
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
        parts = await self._plan(query, facts, cuts, width)
        loaded = await self._load(query, parts)
        lines = []
        for key in sorted(facts):
            line = _line(key, loaded.get(key, []), width, query)
            if line is not None:
                lines.append(line)
        return lines

    async def _plan(
        self,
        query: Query,
        facts: dict[Key, SeriesFacts],
        cuts: dict[Key, int],
        width: int,
    ) -> list[_Part]:
        level = level_for(width) if not any(query.since.values()) else None
        blocks = await self._repository.blocks(
            query.job_ids,
            from_step=query.from_step,
            to_step=query.to_step,
            after=min((query.since.get(job, 0) for job in query.job_ids), default=0),
            level=level,
        )
        layouts = await self._repository.layouts(list({b.layout_id for b in blocks}))
        columns = {
            key: [(n, name) for n, name in enumerate(names) if name in query.names]
            for key, names in layouts.items()
        }
        parts: list[_Part] = []
        cells = 0
        for block in blocks:
            if block.last_seq <= query.since.get(block.job_id, 0):
                continue
            whole = block.first_step >= query.from_step
            whole = whole and (query.to_step is None or block.last_step <= query.to_step)
            for column, name in columns[block.layout_id]:
                key = (block.job_id, name, block.attempt)
                cut = cuts.get(key)
                if key not in facts or (cut is not None and block.first_step >= cut):
                    continue
                part = _Part(key, block, column, cut)
                if level is not None and block.buckets is not None:
                    within = whole and (cut is None or block.last_step < cut)
                    place = place_of(block.places, column) if within or not block.raw else -1
                    if place >= 0:
                        part.level, part.place = level, place
                        part.buckets, part.row_data = block.buckets, block.row_data
                if part.level is None:
                    cells += block.rows
                parts.append(part)
        if cells > MAX_CELLS:
            raise TooMuch(
                f"This is up to {cells} points, more than the {MAX_CELLS} that one answer holds."
            )
        await self._where_only_rollups_are_left(parts, width)
        return [part for part in parts if part.level is not None or part.block.raw]

    async def _where_only_rollups_are_left(self, parts: list[_Part], width: int) -> None:
        """Choose a level for parts whose points are gone: the coarsest that fits, or the finest."""
        gone = [part for part in parts if part.level is None and not part.block.raw]
        ids = list({part.block.id for part in gone})
        found = await self._repository.rollups(ids)
        for part in gone:
            has = {
                rollup.level: (rollup, place)
                for rollup in found.get(part.block.id, [])
                if (place := place_of(rollup.places, part.column)) >= 0
            }
            level = level_for(width, list(has)) or min(has, default=None)
            if level is not None:
                rollup, part.place = has[level]
                part.level, part.buckets = level, rollup.buckets
                part.row_data = rollup.row_data

    async def _load(
        self, query: Query, parts: list[_Part]
    ) -> dict[Key, list[tuple[Summary, bool]]]:
        """Of each series what its blocks hold, in the order of recording, and whether as points."""
        raw = [part for part in parts if part.level is None]
        counts = {part.block.id: part.block.rows for part in raw}
        rows = await self._repository.rows(counts)
        directories = await self._repository.directories(list(counts))
        wanted: dict[tuple[int, int], Slice] = {}
        bands: list[int] = []
        for part in raw:
            directory = directories[part.block.id]
            band = int(directory.bands_of(np.array([part.column]))[0])
            bands.append(band)
            wanted[part.block.id, band] = Slice(part.block.id, None, *directory.place(band))
        rolled = [part for part in parts if part.level is not None]
        slices = [
            Slice(part.block.id, part.level, *extent(part.place, part.buckets)) for part in rolled
        ]
        data = await self._repository.slices([*wanted.values(), *slices])
        values = _Bands(dict(zip(wanted, data, strict=False)), directories)
        pieces = {id(part): data[len(wanted) + n] for n, part in enumerate(rolled)}
        band_of = {id(part): band for part, band in zip(raw, bands, strict=True)}
        of_key: defaultdict[Key, list[_Part]] = defaultdict(list)
        for part in parts:
            of_key[part.key].append(part)
        found: defaultdict[Key, list[tuple[Summary, bool]]] = defaultdict(list)
        for key, own in of_key.items():
            for level, group in groupby(own, key=lambda part: part.level):
                run = list(group)
                if level is not None:
                    buckets = _buckets(run, [pieces[id(part)] or b"" for part in run])
                    found[key].append((_kept_buckets(buckets, query, run[0], level), False))
                    continue
                for part in run:
                    of = rows[part.block.id]
                    points, of = values.points(part, band_of[id(part)], of)
                    found[key].append((_within(points, query, part, of), True))
        return found


def _buckets(run: list[_Part], pieces: list[bytes]) -> tuple[Summary, Any]:
    """The buckets of one series in blocks that follow each other, and the first step of each."""
    rows = np.frombuffer(b"".join(part.row_data for part in run), dtype=BUCKET)
    begin = rows["first"]
    return summary.load(b"".join(pieces), begin, rows["time"], rows["tokens"]), begin


class _Bands:
    """Columns out of bands, each band decompressed once."""

    def __init__(
        self, data: dict[tuple[int, int], bytes | None], directories: dict[int, Directory]
    ) -> None:
        self._data = data
        self._directories = directories
        self._unpacked: dict[tuple[int, int], tuple[Floats, Any]] = {}

    def points(self, part: _Part, band: int, rows: Rows) -> tuple[Summary, Rows]:
        """The points of a part, a bucket each, and their rows."""
        key = (part.block.id, band)
        columns = self._directories[part.block.id].columns(band)
        if key not in self._unpacked:
            self._unpacked[key] = unpack_band(
                self._data[key] or b"", len(columns), len(rows), part.block.masked
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


def _kept_buckets(buckets: tuple[Summary, Any], query: Query, part: _Part, level: int) -> Summary:
    """Those with points. Only where the points are gone may a bucket be but partly in the range;
    it is then kept, and where a newer attempt begins in it, the older one's part as well.
    """
    whole, begin = buckets
    keep = whole.count > 0
    keep &= begin + level > query.from_step
    if query.to_step is not None:
        keep &= begin <= query.to_step
    if part.cut is not None:
        keep &= begin < part.cut
    return whole if keep.all() else whole.take(keep)


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
