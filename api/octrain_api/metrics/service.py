"""Series for readers: attempts joined, points thinned without losing spikes."""

import math
from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.metrics.repository import MetricRepository
from octrain_api.metrics.schemas import Series
from octrain_api.numbers import encode

Point = tuple[int, float]


class MetricService:
    """Reads series. The caller has checked the owner."""

    def __init__(self, session: AsyncSession) -> None:
        self._metrics = MetricRepository(session)

    async def read(
        self,
        job_id: str,
        names: Sequence[str] | None,
        attempt: int | None,
        from_step: int,
        to_step: int | None,
        max_points: int | None,
    ) -> list[Series]:
        """The series of a job. Where attempts overlap in steps, the newer one's points are kept."""
        rows = await self._metrics.series(job_id, names, attempt)
        points: defaultdict[int, list[Point]] = defaultdict(list)
        for chunk in await self._metrics.chunks([row.id for row in rows]):
            points[chunk.series_id].extend(zip(chunk.steps, chunk.values, strict=True))
        series: list[Series] = []
        # By name, newest attempt first: what it has begun to repeat is cut from the older ones.
        first_newer: dict[str, int] = {}
        for row in sorted(rows, key=lambda r: (r.name, -r.attempt)):
            before = first_newer.get(row.name)
            every = points[row.id]
            if every:
                start = min(step for step, _ in every)
                first_newer[row.name] = start if before is None else min(start, before)
            kept = [
                point
                for point in every
                if point[0] >= from_step
                and (to_step is None or point[0] <= to_step)
                and (before is None or point[0] < before)
            ]
            if max_points is not None:
                kept = thin(kept, max_points)
            if kept:
                encoded = [(step, encode(value)) for step, value in kept]
                series.append(Series(name=row.name, attempt=row.attempt, points=encoded))
        return sorted(series, key=lambda s: (s.name, s.attempt))


def thin(points: Sequence[Point], max_points: int) -> list[Point]:
    """At most `max_points` (3 or more) of the points: of each bucket the least, greatest and last.

    Buckets hold equally many points. A non-finite value counts as the greatest, so that a single
    NaN stays visible. The order is kept.
    """
    if len(points) <= max_points:
        return list(points)
    buckets = max(max_points // 3, 1)
    size = math.ceil(len(points) / buckets)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        finite = [i for i, (_, value) in enumerate(bucket) if math.isfinite(value)]
        strange = [i for i, (_, value) in enumerate(bucket) if not math.isfinite(value)]
        chosen = {len(bucket) - 1}
        if finite:
            chosen.add(min(finite, key=lambda i: bucket[i][1]))
        if strange:
            chosen.add(strange[0])
        elif finite:
            chosen.add(max(finite, key=lambda i: bucket[i][1]))
        kept.extend(bucket[i] for i in sorted(chosen))
    return kept
