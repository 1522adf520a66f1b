"""Points and buckets of series, read from blocks and rollups as few bytes as will do."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octrain_api.metrics.catalogue import Catalogue, read_catalogue
from octrain_api.metrics.lines import Key, Line, Part, Query, RawBlock, lines_of
from octrain_api.metrics.lookup import Facts, MetricLookup, SeriesFacts, Slice
from octrain_api.metrics.rollups import level_for, place_of, width_for
from octrain_api.metrics.summary import STORED

# Points and stored buckets that one answer may be made of: bounds its memory.
MAX_CELLS = 8_000_000
# What a part of a series costs beside its cells.
_CELLS_OF_A_PART = 20
# More are looked for in a thread: others are served meanwhile.
_PARTS_AT_ONCE = 2000


class TooMuch(ValueError):
    """The answer would hold too many points."""


@dataclass(frozen=True)
class Found:
    """What was read for an answer; `lines` makes the series of it, for which it needs nothing."""

    query: Query
    parts: Sequence[Part]
    raw: dict[int, RawBlock]
    width: int

    @property
    def effort(self) -> int:
        """What making them costs, in cells about."""
        cells = sum(
            part.block.rows if part.level is None else len(part.data) // STORED.itemsize
            for part in self.parts
        )
        return cells + _CELLS_OF_A_PART * len(self.parts)

    def lines(self) -> list[Line]:
        """The series, by job, name and attempt."""
        return lines_of(self.query, self.parts, self.raw, self.width)


class MetricReader:
    """Answers queries by one lookup."""

    def __init__(self, lookup: MetricLookup) -> None:
        self._lookup = lookup

    async def read(self, query: Query, known: Facts) -> Found:
        """What there is of the series: what a newer attempt has begun to repeat is cut from
        the older ones. The facts are those of the query's jobs, names and steps. Errors: TooMuch.
        """
        catalogue = await read_catalogue(self._lookup, query.names, known)
        facts = catalogue.facts
        if query.attempt is not None:
            facts = {key: one for key, one in facts.items() if key[2] == query.attempt}
        cuts = _cuts(facts)
        facts = {key: one for key, one in facts.items() if _in_range(one, cuts.get(key), query)}
        if not facts:
            return Found(query, [], {}, 1)
        width = 1
        if query.buckets is not None:
            first = max(min(one.first_step for one in facts.values()), query.from_step)
            last = max(one.last_step for one in facts.values())
            last = last if query.to_step is None else min(last, query.to_step)
            width = width_for(first, max(first, last), query.buckets)
        if len(catalogue.blocks) * len(facts) < _PARTS_AT_ONCE:
            parts = _parts(query, catalogue, facts, cuts)
        else:
            parts = await asyncio.to_thread(_parts, query, catalogue, facts, cuts)
        if not any(query.since.values()):
            await self._take_buckets(
                [part for part in parts if part.whole or not part.block.raw], level_for(width)
            )
        gone = [part for part in parts if part.level is None and not part.block.raw]
        await self._take_what_is_left(gone, width)
        parts = [part for part in parts if part.level is not None or part.block.raw]
        cells = sum(part.block.rows for part in parts if part.level is None)
        if cells > MAX_CELLS:
            raise _too_much(cells, "points")
        return Found(query, parts, await self._load(parts), width)

    async def _take_buckets(self, parts: Sequence[Part], level: int | None) -> None:
        """Give parts their buckets at a level, where their blocks have them. Errors: TooMuch."""
        if level is None:
            return
        count = sum(
            min(part.block.rows, part.block.last_step // level - part.block.first_step // level + 1)
            for part in parts
        )
        if count > MAX_CELLS:
            raise _too_much(count, "buckets")
        found = await self._lookup.buckets(
            level, [part.block.id for part in parts], [part.column for part in parts]
        )
        for place, (row_data, data) in found.items():
            part = parts[place]
            part.level, part.row_data, part.data = level, row_data, data

    async def _take_what_is_left(self, gone: Sequence[Part], width: int) -> None:
        """Where the points are gone: the coarsest level that fits, or the finest that there is."""
        has = await self._lookup.levels(list({part.block.id for part in gone}))
        chosen: defaultdict[int, list[Part]] = defaultdict(list)
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

    async def _load(self, parts: Sequence[Part]) -> dict[int, RawBlock]:
        """Of the blocks whose points are needed the rows, and the bands of the parts."""
        columns: defaultdict[int, list[int]] = defaultdict(list)
        for part in parts:
            if part.level is None:
                columns[part.block.id].append(part.column)
        raw = {key: RawBlock(*of) for key, of in (await self._lookup.rows(list(columns))).items()}
        wanted = [
            (key, int(band))
            for key, of_block in columns.items()
            for band in np.unique(raw[key].directory.bands_of(np.array(of_block)))
        ]
        slices = [Slice(key, *raw[key].directory.place(band)) for key, band in wanted]
        for (key, band), data in zip(wanted, await self._lookup.slices(slices), strict=True):
            raw[key].bands[band] = data
        return raw


def _too_much(count: int, of: str) -> TooMuch:
    return TooMuch(f"This is up to {count} {of}, more than the {MAX_CELLS} that one answer holds.")


def _parts(
    query: Query, catalogue: Catalogue, facts: dict[Key, SeriesFacts], cuts: dict[Key, int]
) -> list[Part]:
    """What the blocks may hold of the series, in the order of recording."""
    parts: list[Part] = []
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
            parts.append(Part(key, block, column, cut, whole))
    return parts


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
