"""Metric series and their chunks in the database."""

from collections.abc import Mapping, Sequence

from sqlalchemy import Row, insert, select
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.models import MetricChunk, MetricSeries

Points = tuple[list[int], list[float]]


class MetricRepository:
    """Appends chunks and reads points."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def append(
        self, job_id: str, attempt: int, seq: int, points: Mapping[str, Points]
    ) -> None:
        """Store one telemetry batch: for each name its steps (int) and values (float)."""
        ids = await self._series_ids(job_id, attempt, sorted(points))
        rows = [
            {
                "series_id": ids[name],
                "seq": seq,
                "job_id": job_id,
                "steps": steps,
                "values": values,
            }
            for name, (steps, values) in points.items()
        ]
        await self._session.execute(insert(MetricChunk), rows)

    async def _series_ids(self, job_id: str, attempt: int, names: Sequence[str]) -> dict[str, int]:
        known = select(MetricSeries.name, MetricSeries.id).where(
            MetricSeries.job_id == job_id,
            MetricSeries.attempt == attempt,
            MetricSeries.name.in_(names),
        )
        ids: dict[str, int] = {row.name: row.id for row in await self._session.execute(known)}
        missing = [name for name in names if name not in ids]
        if missing:
            # The job's row lock is held: nobody else adds series of this job.
            statement = (
                upsert(MetricSeries)
                .values([{"job_id": job_id, "attempt": attempt, "name": n} for n in missing])
                .returning(MetricSeries.name, MetricSeries.id)
            )
            ids.update({row.name: row.id for row in await self._session.execute(statement)})
        return ids

    async def series(
        self, job_id: str, names: Sequence[str] | None, attempt: int | None
    ) -> Sequence[MetricSeries]:
        """The series of a job, by name and attempt; `names` None for all."""
        statement = select(MetricSeries).where(MetricSeries.job_id == job_id)
        if names is not None:
            statement = statement.where(MetricSeries.name.in_(names))
        if attempt is not None:
            statement = statement.where(MetricSeries.attempt == attempt)
        statement = statement.order_by(MetricSeries.name, MetricSeries.attempt)
        return (await self._session.scalars(statement)).all()

    async def chunks(self, series_ids: Sequence[int]) -> Sequence[Row[int, list[int], list[float]]]:
        """The chunks of these series in the order in which they came."""
        statement = (
            select(MetricChunk.series_id, MetricChunk.steps, MetricChunk.values)
            .where(MetricChunk.series_id.in_(series_ids))
            .order_by(MetricChunk.series_id, MetricChunk.seq)
        )
        return (await self._session.execute(statement)).all()

    async def batches_after(
        self, job_id: str, after: int, until: int
    ) -> Sequence[Row[int, str, int, list[int], list[float]]]:
        """(seq, name, attempt, steps, values) of the batches numbered in (after, until]."""
        statement = (
            select(
                MetricChunk.seq,
                MetricSeries.name,
                MetricSeries.attempt,
                MetricChunk.steps,
                MetricChunk.values,
            )
            .join(MetricSeries, MetricSeries.id == MetricChunk.series_id)
            .where(MetricChunk.job_id == job_id)
            .where(MetricChunk.seq > after, MetricChunk.seq <= until)
            .order_by(MetricChunk.seq, MetricSeries.name)
        )
        return (await self._session.execute(statement)).all()
