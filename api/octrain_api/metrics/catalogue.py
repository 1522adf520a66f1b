"""Which series jobs have: names, steps, newest values; compacted or not yet."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Row

from octrain_api.metrics.blocks import STATS
from octrain_api.metrics.repository import MetricRepository

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
    blocks: Sequence[Row[Any]]
    # For each layout the columns of the wanted names.
    columns: dict[int, list[tuple[int, str]]]


async def read_catalogue(
    repository: MetricRepository,
    job_ids: Sequence[str],
    names: Names,
    blocks: Sequence[Row[Any]],
) -> Catalogue:
    """Of these blocks only those of tier 0 add to the facts, so all of them must be there."""
    found: dict[tuple[str, str, int], SeriesFacts] = {}
    for row in await repository.series(job_ids, names.exact):
        if row.name in names:
            found[row.job_id, row.name, row.attempt] = SeriesFacts(
                row.job_id,
                row.name,
                row.attempt,
                row.first_step,
                row.last_step,
                row.last_value,
                row.points,
            )
    layouts = await repository.columns(list({b.layout_id for b in blocks}), names.exact)
    columns = {
        key: [(place, name) for place, name in every if name in names]
        for key, every in layouts.items()
    }
    fresh = [b for b in blocks if b.tier == 0 and columns[b.layout_id]]
    stats = await repository.stats([b.id for b in fresh])
    for block in fresh:
        of_column = np.frombuffer(stats[block.id], dtype=STATS).tolist()
        for place, name in columns[block.layout_id]:
            first, last, value, count = of_column[place]
            key = (block.job_id, name, block.attempt)
            facts = found.get(key)
            if facts is None:
                found[key] = SeriesFacts(*key, first, last, value, count)
                continue
            facts.first_step = min(facts.first_step, first)
            facts.last_step = max(facts.last_step, last)
            facts.last_value = value
            facts.points += count
    return Catalogue(found, blocks, columns)
