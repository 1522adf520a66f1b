"""What the controller's loops read and write across jobs."""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import Integer, Row, case, cast, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from octrain_api.clocks import API, CONTROLLER
from octrain_api.database import seconds
from octrain_api.jobs.transitions import PLACED, Status
from octrain_api.models import Attempt, GpuActivity, Job, Node, Outbox, ServiceClock

# Sent between two looks at the outbox, and then marked together.
_MOST_MESSAGES = 100


class ControllerRepository:
    """Queries of the relay and the reconciler."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def messages_due(self, resend_after: float, max_sendings: int) -> Sequence[Outbox]:
        """Messages never sent, or sent so long ago that they must be sent again."""
        due = (Outbox.sent_at.is_(None)) | (Outbox.sent_at <= func.now() - seconds(resend_after))
        statement = (
            select(Outbox)
            .where(due, Outbox.sendings < max_sendings)
            .order_by(Outbox.created_at)
            .limit(_MOST_MESSAGES)
        )
        return (await self._session.scalars(statement)).all()

    async def mark_sent(self, attempt_ids: Sequence[str]) -> None:
        """Count a sending of each; a row may be gone, when the claim was faster."""
        rows = (
            select(Outbox.attempt_id)
            .where(Outbox.attempt_id.in_(attempt_ids))
            .order_by(Outbox.attempt_id)
            .with_for_update()
        )
        await self._session.execute(
            update(Outbox)
            .where(Outbox.attempt_id.in_(rows))
            .values(sendings=Outbox.sendings + 1, sent_at=func.now())
        )

    async def undelivered(
        self, resend_after: float, max_sendings: int, tolerance: int
    ) -> Sequence[Row[str, str, bool]]:
        """(job id, attempt id, whether its node is silent) that will not be claimed any more.

        Its last sending, too, was claimed by nobody; or its node has fallen silent; or, as the
        broker may be away for long and a node that starts over and over has its messages sent anew
        each time, all sendings would be over by now. The last is judged only while API and
        controller have been there, without a break, for as long: nobody can claim without them.
        """
        patience = seconds(resend_after * (max_sendings + 1))
        there = select(func.count()).where(
            ServiceClock.name.in_([API, CONTROLLER]),
            ServiceClock.up_since <= func.now() - patience,
            ServiceClock.alive_at >= func.now() - seconds(tolerance),
        )
        told = (Outbox.sendings >= max_sendings) & (
            Outbox.sent_at <= func.now() - seconds(resend_after)
        )
        late = (Attempt.created_at <= func.now() - patience) & (there.scalar_subquery() == 2)
        silent = Node.unreachable_since.is_not(None)
        statement = (
            select(Attempt.job_id, Attempt.id, silent)
            .join(Node, Node.id == Attempt.node_id)
            .outerjoin(Outbox, Outbox.attempt_id == Attempt.id)
            .where(Attempt.status == "placed", told | silent | late)
        )
        return (await self._session.execute(statement)).all()

    async def expired(self, margin: float) -> Sequence[Row[str, str]]:
        """(job id, attempt id) whose lease ran out more than `margin` seconds ago."""
        statement = select(Attempt.job_id, Attempt.id).where(
            Attempt.status == "running",
            Attempt.lease_expires_at <= func.now() - seconds(margin),
        )
        return (await self._session.execute(statement)).all()

    async def extend_leases(self, by: timedelta) -> int:
        """Add downtime to every lease and to the deadlines of stops and waits; how many leases."""
        # Jobs before attempts, like everybody who locks both, and each in the order of ids.
        deadlines = (Job.stop_deadline_at.is_not(None)) | (Job.queue_deadline_at.is_not(None))
        jobs = select(Job.id).where(deadlines).order_by(Job.id).with_for_update()
        await self._session.execute(
            update(Job)
            .where(Job.id.in_(jobs))
            .values(
                stop_deadline_at=Job.stop_deadline_at + by,
                queue_deadline_at=Job.queue_deadline_at + by,
            )
        )
        running = (
            select(Attempt.id)
            .where(Attempt.status == "running")
            .order_by(Attempt.id)
            .with_for_update()
        )
        result = await self._session.execute(
            update(Attempt)
            .where(Attempt.id.in_(running))
            .values(lease_expires_at=Attempt.lease_expires_at + by)
            .returning(Attempt.id)
        )
        return len(result.all())

    async def queue_time_over(self) -> Sequence[str]:
        """Queued jobs that have waited longer than they may."""
        statement = select(Job.id).where(
            Job.status == Status.QUEUED.value, Job.queue_deadline_at <= func.now()
        )
        return (await self._session.scalars(statement)).all()

    async def run_time_over(self) -> Sequence[Row[str, str]]:
        """(job id, attempt id) of jobs whose attempts have run longer than they may together."""
        statement = (
            select(Attempt.job_id, Attempt.id)
            .join(Job, Job.id == Attempt.job_id)
            .where(Attempt.status == "running", Attempt.run_deadline_at <= func.now())
            .where(Job.status != Status.CANCELLING.value)
        )
        return (await self._session.execute(statement)).all()

    async def stalled(self) -> Sequence[Row[str, str]]:
        """(job id, attempt id) whose supervisor is heard, but tells no step for too long.

        Judged at the last time it was heard: a silence of the node is no stall.
        """
        statement = select(Attempt.job_id, Attempt.id).where(
            Attempt.status == "running",
            Attempt.stalled_since.is_(None),
            Attempt.last_heartbeat_at - Attempt.progress_at > seconds(Attempt.stall_seconds),
        )
        return (await self._session.execute(statement)).all()

    async def gpu_idle(self) -> Sequence[Row[str, str]]:
        """(job id, attempt id) whose GPUs have lain idle longer than the job allows.

        Judged at the last time they were seen: what is not seen is not idle.
        """
        stored = Job.spec["limits"]["idle_gpu_timeout_seconds"].astext
        # What is no number sets no limit: the cast would fail for every job.
        limit = cast(case((stored.regexp_match("^[0-9]{1,9}$"), stored)), Integer)
        idle = GpuActivity.seen_at - GpuActivity.busy_at
        statement = (
            select(Attempt.job_id, Attempt.id)
            .join(GpuActivity, GpuActivity.attempt_id == Attempt.id)
            .join(Job, Job.id == Attempt.job_id)
            .where(Attempt.status == "running", idle > seconds(limit))
            .where(Job.status.in_([Status.STARTING.value, Status.RUNNING.value]))
        )
        return (await self._session.execute(statement)).all()

    async def gpu_idle_seconds(self, attempt_id: str) -> float:
        """How long the attempt's GPUs have lain idle, when they were last seen."""
        idle = func.extract("epoch", GpuActivity.seen_at - GpuActivity.busy_at)
        statement = select(idle).where(GpuActivity.attempt_id == attempt_id)
        return float(await self._session.scalar(statement) or 0.0)

    async def silent(self, heartbeat_ttl: float) -> Sequence[Row[str, str]]:
        """(job id, attempt id) not heard for `heartbeat_ttl` seconds and not yet said to be."""
        statement = select(Attempt.job_id, Attempt.id).where(
            Attempt.status == "running",
            Attempt.unreachable_since.is_(None),
            Attempt.last_heartbeat_at <= func.now() - seconds(heartbeat_ttl),
        )
        return (await self._session.execute(statement)).all()

    async def orphans(self) -> Sequence[str]:
        """Jobs whose status says that an attempt lives, while none does."""
        live = aliased(Attempt)
        statement = select(Job.id).where(
            Job.status.in_([status.value for status in PLACED]),
            ~exists().where(live.job_id == Job.id, live.status != "ended"),
        )
        return (await self._session.scalars(statement)).all()
