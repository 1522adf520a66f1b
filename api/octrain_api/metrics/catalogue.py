"""Which series jobs have: names, steps, newest values; compacted or not yet."""

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


class Names:
    """Names and patterns of names (`*`, `?`, `[...]`; `*` matches a slash too); None is all."""

    def __init__(self, patterns: Sequence[str] | None) -> None:
        self.exact: list[str] | None = None
        self._matches: re.Pattern[str] | None = None
        if patterns is not None:
            if not any(_WILD & set(pattern) for pattern in patterns):
                self.exact = list(dict.fromkeys(patterns))
            either = "|".join(fnmatch.translate(pattern) for pattern in patterns) or "(?!)"
            self._matches = re.compile(either)
            self._patterns = set(patterns)

    def __contains__(self, name: str) -> bool:
        # A name is itself, even where it looks like a pattern.
        if self._matches is None or name in self._patterns:
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
    found = {(one.job_id, one.name, one.attempt): one for one in known.series if one.name in names}
    columns = {key: names.columns(layout) for key, layout in known.layouts.items()}
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
