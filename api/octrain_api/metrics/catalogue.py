"""Which series jobs have: names, steps, newest values; compacted or not yet."""

import asyncio
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octrain_api.metrics.blocks import STATS
from octrain_api.metrics.layouts import Layout
from octrain_api.metrics.lookup import BlockFacts, Facts, MetricLookup, SeriesFacts

_WILD = frozenset("*?[")
# Of names that are patterns, in one question: each is held against every name there is.
MOST_PATTERNS = 100
# More comparisons of a pattern and a name are made in a thread: others are served meanwhile.
_COMPARED_AT_ONCE = 10_000


class TooManyPatterns(ValueError):
    """More patterns than one question may have."""


class Names:
    """Names and patterns of names (`*`, `?`, `[...]`; `*` matches a slash too); None is all.

    Errors: TooManyPatterns.
    """

    def __init__(self, patterns: Sequence[str] | None) -> None:
        self.exact: list[str] | None = None
        self._matches: re.Pattern[str] | None = None
        # How many of them are compared with each name.
        self.patterns = 0
        if patterns is not None:
            self._given = frozenset(patterns)
            wild = sorted(one for one in self._given if not _WILD.isdisjoint(one))
            if not wild:
                self.exact = list(dict.fromkeys(patterns))
            self.patterns = len(wild)
            if self.patterns > MOST_PATTERNS:
                raise TooManyPatterns(
                    f"These are {self.patterns} patterns, more than the {MOST_PATTERNS} that one "
                    "question may have; of names without `*`, `?` and `[` there may be more."
                )
            self._matches = re.compile("|".join(map(fnmatch.translate, wild)) or "(?!)")

    def __contains__(self, name: str) -> bool:
        # A name is itself, even where it looks like a pattern.
        if self._matches is None or name in self._given:
            return True
        return self._matches.match(name) is not None

    def columns(self, layout: Layout) -> list[tuple[int, str]]:
        """The columns of such names, by place."""
        if self.exact is not None:
            return layout.of(self.exact)
        return [(place, name) for place, name in enumerate(layout.names) if name in self]


@dataclass(frozen=True)
class Catalogue:
    """The series of jobs by job, name and attempt, and the blocks that may hold their points."""

    facts: dict[tuple[str, str, int], SeriesFacts]
    blocks: Sequence[BlockFacts]
    # For each layout the columns of the wanted names.
    columns: dict[int, list[tuple[int, str]]]


async def read_catalogue(lookup: MetricLookup, names: Names, known: Facts) -> Catalogue:
    """The series of these names, which the facts are of."""
    count = len(known.series) + sum(len(layout.names) for layout in known.layouts.values())
    if names.patterns * count < _COMPARED_AT_ONCE:
        found, columns = _matching(names, known)
    else:
        found, columns = await asyncio.to_thread(_matching, names, known)
    fresh = [b for b in known.blocks if b.tier == 0 and columns[b.layout_id]]
    stats = await lookup.stats([b.id for b in fresh])
    # Blocks of one layout are summed up as a whole, which leaves one look at each name.
    groups: dict[tuple[str, int, int], list[Any]] = {}
    for block in fresh:
        key = (block.job_id, block.attempt, block.layout_id)
        # The group of the newest block comes last.
        groups[key] = [*groups.pop(key, []), np.frombuffer(stats[block.id], dtype=STATS)]
    for (job_id, attempt, layout_id), of_blocks in groups.items():
        together = np.stack(of_blocks)
        first = together["first"].min(axis=0).tolist()
        last = together["last"].max(axis=0).tolist()
        value = together["value"][-1].tolist()
        count = together["count"].sum(axis=0).tolist()
        for place, name in columns[layout_id]:
            least, greatest, points = first[place], last[place], count[place]
            before = found.get((job_id, name, attempt))
            if before is not None:
                least = min(before.first_step, least)
                greatest = max(before.last_step, greatest)
                points += before.points
            found[job_id, name, attempt] = SeriesFacts(
                job_id, name, attempt, least, greatest, value[place], points
            )
    return Catalogue(found, known.blocks, columns)


def _matching(
    names: Names, known: Facts
) -> tuple[dict[tuple[str, str, int], SeriesFacts], dict[int, list[tuple[int, str]]]]:
    """The series of these names, and for each layout their columns."""
    found = {(one.job_id, one.name, one.attempt): one for one in known.series if one.name in names}
    return found, {key: names.columns(layout) for key, layout in known.layouts.items()}
