"""Which series jobs have: names, steps, newest values; compacted or not yet."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octrain_api.metrics.blocks import STATS
from octrain_api.metrics.lookup import BlockFacts, MetricLookup

_WILD = frozenset("*?[")


@dataclass
class SeriesFacts:
    """One metric of one attempt."""

    job_id: str
    name: str
    attempt: int
    first_step: int
    last_step: int
    last_value: float
    points: int


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


@dataclass(frozen=True)
class Catalogue:
    """The series of jobs by job, name and attempt, and the blocks that may hold their points."""

    facts: dict[tuple[str, str, int], SeriesFacts]
    blocks: Sequence[BlockFacts]
    # For each layout the columns of the wanted names.
    columns: dict[int, list[tuple[int, str]]]


async def read_catalogue(
    lookup: MetricLookup,
    job_ids: Sequence[str],
    names: Names,
    blocks: Sequence[BlockFacts],
) -> Catalogue:
    """Of these blocks only those of tier 0 add to the facts, so all of them must be there."""
    found: dict[tuple[str, str, int], SeriesFacts] = {}
    for row in await lookup.series(job_ids, names.exact):
        facts = SeriesFacts(*row)
        if facts.name in names:
            found[facts.job_id, facts.name, facts.attempt] = facts
    layouts = await lookup.columns(list({b.layout_id for b in blocks}), names.exact)
    columns = {
        key: [(place, name) for place, name in every if name in names]
        for key, every in layouts.items()
    }
    fresh = [b for b in blocks if b.tier == 0 and columns[b.layout_id]]
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
            known = found.get((job_id, name, attempt))
            if known is None:
                of_name = (first[place], last[place], value[place], count[place])
                found[job_id, name, attempt] = SeriesFacts(job_id, name, attempt, *of_name)
                continue
            known.first_step = min(known.first_step, first[place])
            known.last_step = max(known.last_step, last[place])
            known.last_value = value[place]
            known.points += count[place]
    return Catalogue(found, blocks, columns)
