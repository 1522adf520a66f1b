"""Samples of nodes: stored once, bounded, thinned for readers; and which GPUs lie idle."""

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from statistics import fmean
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now
from octrain_api.keys.principal import Principal
from octrain_api.nodes.metrics_repository import NodeMetricRepository
from octrain_api.nodes.metrics_schemas import (
    GpuUse,
    HostUse,
    NodeMetrics,
    Sample,
    SampleIn,
    SamplesRequest,
)
from octrain_api.nodes.repository import NodeRepository
from octrain_api.problems import not_found
from octrain_api.settings import Settings

BUSY = 0.01
"""From this utilisation on a GPU counts as at work."""

# A time without samples longer than this is unknown: the GPUs were not seen idle in it.
_LONGEST_GAP = timedelta(seconds=120)


class NodeMetricService:
    """Nodes belong to the owner of the key that registered them; every reader may see them."""

    def __init__(self, session: AsyncSession, settings: Settings) -> None:
        self._session = session
        self._settings = settings.node_metrics
        self._nodes = NodeRepository(session)
        self._metrics = NodeMetricRepository(session)

    async def store(self, node_id: str, principal: Principal, request: SamplesRequest) -> int:
        """Store what is new of the samples; how many that were."""
        node = await self._nodes.get(node_id)
        if node is None or node.name != principal.node:
            raise not_found("node", node_id)
        keep = self._settings.keep_hours * 3600.0
        samples = [sample for sample in request.samples if sample.age_seconds < keep]
        if not samples:
            return 0
        now = await database_now(self._session)
        times = {s.id: now - timedelta(seconds=s.age_seconds) for s in samples}
        rows = [
            {
                "id": s.id,
                "time": times[s.id],
                "host": s.host.model_dump(exclude_none=True),
                "gpus": [gpu.model_dump(exclude_none=True) for gpu in s.gpus],
            }
            for s in {s.id: s for s in samples}.values()
        ]
        new = await self._metrics.add(node_id, rows)
        await self._metrics.forget(node_id, keep)
        fresh = [(times[s.id], s) for s in samples if s.id in new and s.gpus]
        if fresh:
            await self._note_activity(node_id, sorted(fresh, key=itemgetter(0)))
        return len(new)

    async def _note_activity(
        self, node_id: str, samples: Sequence[tuple[datetime, SampleIn]]
    ) -> None:
        """When the GPUs of each attempt here were last seen, and last seen at work."""
        for attempt in await self._metrics.gpu_attempts(node_id):
            known = await self._metrics.activity(attempt.id)
            seen, busy = (known.seen_at, known.busy_at) if known else (None, None)
            before = seen
            for time, sample in samples:
                use = _utilization(sample, attempt.gpu_indices)
                if use is None or attempt.claimed_at is None or time < attempt.claimed_at:
                    continue
                if seen is not None and time <= seen:
                    continue
                if busy is None or seen is None or use >= BUSY:
                    busy = time
                elif time - seen > _LONGEST_GAP:
                    busy += time - seen
                seen = time
            if seen is not None and busy is not None and seen != before:
                await self._metrics.note_activity(attempt.id, seen, busy)

    async def read(self, node_id: str, since: float, max_points: int) -> NodeMetrics:
        """The samples of the last `since` seconds; of many, means of equally many each."""
        if await self._nodes.get(node_id) is None:
            raise not_found("node", node_id)
        rows = await self._metrics.of_node(node_id, since)
        size = max(math.ceil(len(rows) / max_points), 1)
        samples = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            indices = sorted({gpu["index"] for row in part for gpu in row.gpus})
            samples.append(
                Sample(
                    time=part[-1].time,
                    host=HostUse(**_means([row.host for row in part])),
                    gpus=[
                        GpuUse(
                            **_means([g for row in part for g in row.gpus if g["index"] == index])
                            | {"index": index}
                        )
                        for index in indices
                    ],
                )
            )
        return NodeMetrics(node_id=node_id, samples=samples)


def _utilization(sample: SampleIn, indices: Iterable[int]) -> float | None:
    """That of the busiest of these GPUs; None unless all of them are known."""
    by_index = {gpu.index: gpu.utilization for gpu in sample.gpus}
    uses = [by_index.get(index) for index in indices]
    known = [use for use in uses if use is not None]
    return max(known) if known and len(known) == len(uses) else None


def _means(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    mean: Callable[[list[float]], float] = fmean
    names = {name for part in parts for name in part}
    return {name: mean([part[name] for part in parts if name in part]) for name in names}
