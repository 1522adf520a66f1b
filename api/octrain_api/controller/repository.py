"""What the controller's loops read and write across jobs."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Row, exists, func, select, update
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from octrain_api.database import seconds
from octrain_api.jobs.transitions import PLACED, Status
from octrain_api.models import Artifact, Attempt, Job, Node, Outbox


class ControllerRepository:
    """Queries of the scheduler, the relay and the reconciler."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def queue(self) -> Sequence[Row[str, int, str | None, list[str], Any, Any]]:
        """(id, attempt, waiting_for, avoid_nodes, resources, engine) by priority, then age."""
        statement = (
            select(
                Job.id,
                Job.attempt,
                Job.waiting_for,
                Job.avoid_nodes,
                Job.spec["resources"].label("resources"),
                Job.spec["recipe"]["engine"].label("engine"),
            )
            .where(Job.status == Status.QUEUED.value)
            .order_by(Job.priority.desc(), Job.created_at, Job.id)
        )
        return (await self._session.execute(statement)).all()

    async def pinned_nodes(self, job_ids: Sequence[str]) -> dict[str, str]:
        """The node that alone reaches a job's newest checkpoint, for those jobs that have one."""
        if not job_ids:
            return {}
        statement = (
            select(Artifact.job_id, Node.id, Node.private_roots)
            .join(Attempt, Attempt.id == Artifact.attempt_id)
            .join(Node, Node.id == Attempt.node_id)
            .where(Artifact.kind == "checkpoint", Artifact.job_id.in_(job_ids))
            .order_by(Artifact.job_id, Artifact.step.desc(), Artifact.created_at.desc())
            .ext(distinct_on(Artifact.job_id))
        )
        rows = await self._session.execute(statement)
        return {job_id: node_id for job_id, node_id, private in rows if private}

    async def set_waiting_for(self, job_id: str, text: str) -> bool:
        """Say what a queued job waits for; whether that is news."""
        statement = (
            update(Job)
            .where(Job.id == job_id, Job.status == Status.QUEUED.value)
            .where(Job.waiting_for.is_distinct_from(text))
            .values(waiting_for=text, version=Job.version + 1)
            .returning(Job.id)
        )
        return (await self._session.execute(statement)).first() is not None

    async def messages_due(self, resend_after: float, max_sendings: int) -> Sequence[Outbox]:
        """Messages never sent, or sent so long ago that they must be sent again."""
        due = (Outbox.sent_at.is_(None)) | (Outbox.sent_at <= func.now() - seconds(resend_after))
        statement = (
            select(Outbox)
            .where(due, Outbox.sendings < max_sendings)
            .order_by(Outbox.created_at)
            .limit(500)
        )
        return (await self._session.scalars(statement)).all()

    async def mark_sent(self, attempt_id: str) -> None:
        """Count a sending; the row may be gone, when the claim was faster."""
        await self._session.execute(
            update(Outbox)
            .where(Outbox.attempt_id == attempt_id)
            .values(sendings=Outbox.sendings + 1, sent_at=func.now())
        )

    async def undelivered(self, resend_after: float, max_sendings: int) -> Sequence[Row[str, str]]:
        """(job id, attempt id) whose last sending, too, was claimed by nobody."""
        statement = (
            select(Attempt.job_id, Attempt.id)
            .join(Outbox, Outbox.attempt_id == Attempt.id)
            .where(Outbox.sendings >= max_sendings)
            .where(Outbox.sent_at <= func.now() - seconds(resend_after))
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
        """Add downtime to every lease and every cancel's deadline; how many leases."""
        # Jobs before attempts, like everybody who locks both.
        await self._session.execute(
            update(Job)
            .where(Job.cancel_deadline_at.is_not(None))
            .values(cancel_deadline_at=Job.cancel_deadline_at + by)
        )
        result = await self._session.execute(
            update(Attempt)
            .where(Attempt.status == "running")
            .values(lease_expires_at=Attempt.lease_expires_at + by)
            .returning(Attempt.id)
        )
        return len(result.all())

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
