"""Which series jobs have: names, steps, newest values; compacted or not yet."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


async def read_catalogue(
    repository: MetricRepository, job_ids: Sequence[str], names: Names
) -> dict[tuple[str, str, int], SeriesFacts]:
    """The series of jobs, by job, name and attempt."""
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
    blocks = [b for b in await repository.blocks(job_ids, open_only=True) if b.tier == 0]
    if not blocks:
        return found
    layouts = await repository.layouts(list({b.layout_id for b in blocks}))
    wanted = {
        key: [(n, name) for n, name in enumerate(layout) if name in names]
        for key, layout in layouts.items()
    }
    blocks = [b for b in blocks if wanted[b.layout_id]]
    stats = await repository.stats([b.id for b in blocks])
    for block in blocks:
        columns = np.frombuffer(stats[block.id], dtype=STATS).tolist()
        for column, name in wanted[block.layout_id]:
            first, last, value, count = columns[column]
            key = (block.job_id, name, block.attempt)
            facts = found.get(key)
            if facts is None:
                found[key] = SeriesFacts(*key, first, last, value, count)
                continue
            facts.first_step = min(facts.first_step, first)
            facts.last_step = max(facts.last_step, last)
            facts.last_value = value
            facts.points += count
    return found
