"""What owners use, and may use, in the database."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.jobs.transitions import PLACED, Status
from octrain_api.models import Attempt, Job, OwnerQuota

_COUNT = text(
    """
    INSERT INTO usage_days AS u (owner, day, gpu_seconds, cpu_seconds, attempts)
    SELECT owner, CAST(now() AT TIME ZONE 'UTC' AS date), CAST(:gpu AS float8),
           CAST(:cpu AS float8), 1
    FROM jobs WHERE id = :job
    ON CONFLICT (owner, day) DO UPDATE SET
        gpu_seconds = u.gpu_seconds + excluded.gpu_seconds,
        cpu_seconds = u.cpu_seconds + excluded.cpu_seconds,
        attempts = u.attempts + 1
    """
)
_ENDED = text(
    """
    SELECT coalesce(sum(gpu_seconds), 0) AS gpu, coalesce(sum(cpu_seconds), 0) AS cpu,
           coalesce(sum(attempts), 0) AS attempts
    FROM usage_days
    WHERE owner = :owner AND day > CAST(now() AT TIME ZONE 'UTC' AS date) - CAST(:days AS int)
    """
)
_LIVE = text(
    """
    SELECT coalesce(sum(seconds * gpus), 0) AS gpu,
           coalesce(sum(seconds * cpu_slots), 0) AS cpu
    FROM (
        SELECT cardinality(a.gpu_indices) AS gpus, a.cpu_slots,
               CAST(extract(epoch FROM now() - a.claimed_at) AS float8) AS seconds
        FROM jobs j JOIN attempts a ON a.job_id = j.id
        WHERE j.owner = :owner AND j.status IN ('starting', 'running', 'pausing', 'cancelling')
          AND a.status = 'running'
    ) AS live
    """
)


@dataclass(frozen=True)
class Used:
    """GPU-seconds and CPU-slot-seconds within a window, and how many runs have ended in it."""

    gpu_seconds: float
    cpu_seconds: float
    attempts: int


class UsageRepository:
    """Reads and counts use; reads and writes quotas."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def count(self, attempt: Attempt) -> None:
        """Count a claimed attempt that has ended just now.

        The row of its owner and day is locked until the commit: after the job and the attempt, and
        before the node, as everybody who ends attempts does it.
        """
        if attempt.claimed_at is None or attempt.ended_at is None:
            return
        seconds = max((attempt.ended_at - attempt.claimed_at).total_seconds(), 0.0)
        values = {
            "job": attempt.job_id,
            "gpu": seconds * len(attempt.gpu_indices),
            "cpu": seconds * attempt.cpu_slots,
        }
        await self._session.execute(_COUNT, values)

    async def used(self, owner: str, days: int) -> Used:
        """What an owner has used in the last so many days, and uses now."""
        ended = (await self._session.execute(_ENDED, {"owner": owner, "days": days})).one()
        live = (await self._session.execute(_LIVE, {"owner": owner})).one()
        return Used(float(ended.gpu + live.gpu), float(ended.cpu + live.cpu), int(ended.attempts))

    async def jobs(self, owner: str) -> tuple[int, int]:
        """How many jobs of an owner are queued, and how many hold a place on a node."""
        final = [Status.SUCCEEDED.value, Status.FAILED.value, Status.CANCELLED.value]
        statement = (
            select(Job.status, func.count())
            .where(Job.owner == owner, Job.status.not_in(final))
            .group_by(Job.status)
        )
        counts = {row[0]: row[1] for row in await self._session.execute(statement)}
        return counts.get(Status.QUEUED.value, 0), sum(counts.get(s.value, 0) for s in PLACED)

    async def placed_by_owner(self) -> dict[str, int]:
        """How many jobs of each owner hold a place on a node."""
        statement = (
            select(Job.owner, func.count())
            .where(Job.status.in_([status.value for status in PLACED]))
            .group_by(Job.owner)
        )
        return {row[0]: row[1] for row in await self._session.execute(statement)}

    async def quotas(self, owner: str) -> OwnerQuota | None:
        """The quotas that an owner has of their own."""
        return await self._session.get(OwnerQuota, owner)

    async def all_quotas(self) -> Sequence[OwnerQuota]:
        """Every owner's own quotas, by owner."""
        return (await self._session.scalars(select(OwnerQuota).order_by(OwnerQuota.owner))).all()

    async def set_quotas(
        self, owner: str, queued: int | None, running: int | None, gpu_hours: float | None
    ) -> None:
        """Give an owner quotas of their own."""
        values = {
            "queued": queued,
            "running": running,
            "gpu_hours": gpu_hours,
            "updated_at": func.now(),
        }
        statement = insert(OwnerQuota).values(owner=owner, **values)
        await self._session.execute(
            statement.on_conflict_do_update(index_elements=[OwnerQuota.owner], set_=values)
        )

    async def remove_quotas(self, owner: str) -> bool:
        """Take an owner's own quotas away; whether there were any."""
        statement = delete(OwnerQuota).where(OwnerQuota.owner == owner).returning(OwnerQuota.owner)
        return (await self._session.execute(statement)).first() is not None
