"""Attempts and their outbox rows in the database."""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.artifacts.leftovers import ENDED_AFTER, LeftoverRepository
from octrain_api.database import database_now, seconds
from octrain_api.models import Artifact, Attempt, Job, Node, Outbox, fencing_tokens
from octrain_api.usage.repository import UsageRepository


def artifact_prefix(attempt: Attempt) -> str:
    """The folder of the store that belongs to this attempt alone."""
    return f"jobs/{attempt.job_id}/attempts/{attempt.number}"


class AttemptRepository:
    """Reads, writes and locks attempts."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def job_id_of(self, attempt_id: str, node_name: str | None) -> str | None:
        """The attempt's job, if the attempt was placed on the node of this name."""
        statement = (
            select(Attempt.job_id)
            .join(Node, Node.id == Attempt.node_id)
            .where(Attempt.id == attempt_id, Node.name == node_name)
        )
        return (await self._session.scalars(statement)).one_or_none()

    async def lock(self, attempt_id: str) -> Attempt:
        """The attempt with its row locked; its job's row is locked already."""
        statement = (
            select(Attempt)
            .where(Attempt.id == attempt_id)
            .with_for_update()
            .execution_options(populate_existing=True)
        )
        return (await self._session.scalars(statement)).one()

    async def next_fencing_token(self) -> int:
        """A token larger than every one before."""
        token: int = await self._session.scalar(select(fencing_tokens.next_value()))  # type: ignore[assignment]
        return token

    async def add(self, attempt: Attempt, outbox: Outbox) -> None:
        """Store a placed attempt and the message that tells its node."""
        self._session.add(attempt)
        await self._session.flush()
        self._session.add(outbox)
        await self._session.flush()

    async def forget_message(self, attempt_id: str) -> None:
        """The message is no longer needed: the attempt is claimed or has ended."""
        await self._session.execute(delete(Outbox).where(Outbox.attempt_id == attempt_id))

    async def claim(self, attempt: Attempt, supervisor: str, max_run_time: int | None) -> None:
        """Mark the attempt as claimed now; start its lease, and the clock of its job's run time."""
        now = await database_now(self._session)
        attempt.status = "running"
        attempt.supervisor = supervisor
        attempt.claimed_at = now
        attempt.last_heartbeat_at = now
        attempt.progress_at = now
        attempt.lease_number = 1
        attempt.lease_granted_until = now + timedelta(seconds=attempt.lease_seconds)
        attempt.lease_expires_at = attempt.lease_granted_until
        if max_run_time is not None:
            left = timedelta(seconds=max_run_time) - await self._run_time(attempt.job_id)
            attempt.run_deadline_at = now + max(left, timedelta())
        await self._session.flush()

    async def _run_time(self, job_id: str) -> timedelta:
        """How long the ended attempts of the job ran together."""
        ran = func.sum(Attempt.ended_at - Attempt.claimed_at)
        statement = select(ran).where(Attempt.job_id == job_id, Attempt.status == "ended")
        return await self._session.scalar(statement) or timedelta()

    async def progressed(self, attempt: Attempt) -> bool:
        """The step or the phase has changed now; whether the attempt was stalled until now."""
        attempt.progress_at = await database_now(self._session)
        was_stalled = attempt.stalled_since is not None
        attempt.stalled_since = None
        return was_stalled

    async def failed_like(self, attempt: Attempt) -> bool:
        """Whether an earlier attempt of the job ended for the same reason at the same step."""
        statement = select(
            exists().where(
                Attempt.job_id == attempt.job_id,
                Attempt.number < attempt.number,
                Attempt.reason == attempt.reason,
                Attempt.step.is_not_distinct_from(attempt.step),
            )
        )
        return bool(await self._session.scalar(statement))

    async def renew(
        self, attempt: Attempt, job: Job, forced_lease: int, held: int | None = None
    ) -> int:
        """Grant the next lease and return the seconds that it has.

        Past the deadline of a cancel or pause none is granted beyond deadline + `forced_lease`,
        so that a supervisor that is alive but does not end its trainer loses the attempt all the
        same. `held` is the number of the lease that it says it holds. Only when that is the last
        one granted is it sure that it counts on none before, which may have ended later: the
        answer with a shorter one may have been lost.
        """
        now = await database_now(self._session)
        granted = now + timedelta(seconds=attempt.lease_seconds)
        if job.stop_deadline_at is not None:
            granted = min(granted, job.stop_deadline_at + timedelta(seconds=forced_lease))
        before = attempt.lease_expires_at
        if held is not None and held == attempt.lease_number:
            before = attempt.lease_granted_until
        attempt.lease_expires_at = max(granted, before) if before is not None else granted
        attempt.lease_number += 1
        attempt.lease_granted_until = granted
        attempt.last_heartbeat_at = now
        attempt.unreachable_since = None
        await self._session.flush()
        return max(int((granted - now).total_seconds()), 1)

    async def end(
        self,
        attempt: Attempt,
        *,
        outcome: str,
        reason: str,
        detail: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        """Close the attempt: from now on every write with its token is refused."""
        attempt.status = "ended"
        attempt.outcome = outcome
        attempt.reason = reason
        attempt.detail = detail
        attempt.exit_code = exit_code
        attempt.ended_at = await database_now(self._session)
        attempt.lease_expires_at = None
        attempt.lease_granted_until = None
        attempt.unreachable_since = None
        await self._session.flush()
        await UsageRepository(self._session).count(attempt)
        await self.forget_message(attempt.id)
        node = await self._session.get(Node, attempt.node_id)
        if attempt.claimed_at is not None and node is not None and node.artifact_url:
            # What it wrote and did not register, or was cut off from registering.
            url = f"{node.artifact_url.rstrip('/')}/{artifact_prefix(attempt)}"
            await LeftoverRepository(self._session).add(node, url, ENDED_AFTER)

    async def newest_checkpoints(self, job_id: str, limit: int) -> Sequence[Artifact]:
        """Registered checkpoints not known to be damaged: by step, then age, newest first."""
        statement = (
            select(Artifact)
            .where(Artifact.job_id == job_id, Artifact.kind == "checkpoint")
            .where(Artifact.step.is_not(None), ~Artifact.damaged)
            .order_by(Artifact.step.desc(), Artifact.created_at.desc())
            .limit(limit)
        )
        return (await self._session.scalars(statement)).all()

    async def checkpoint_node(self, job_id: str) -> str | None:
        """The node on which the newest of these was written."""
        statement = (
            select(Attempt.node_id)
            .join(Artifact, Artifact.attempt_id == Attempt.id)
            .where(Artifact.job_id == job_id, Artifact.kind == "checkpoint")
            .where(Artifact.step.is_not(None), ~Artifact.damaged)
            .order_by(Artifact.step.desc(), Artifact.created_at.desc())
            .limit(1)
        )
        return (await self._session.scalars(statement)).one_or_none()

    async def mark_damaged(self, job_id: str, artifact_id: str) -> bool:
        """Resume from this checkpoint of the job no more; whether that is news."""
        statement = (
            update(Artifact)
            .where(Artifact.id == artifact_id, Artifact.job_id == job_id)
            .where(Artifact.kind == "checkpoint", ~Artifact.damaged)
            .values(damaged=True)
            .returning(Artifact.id)
        )
        return (await self._session.execute(statement)).first() is not None

    async def find_artifact(self, attempt_id: str, kind: str, name: str) -> Artifact | None:
        """The artifact that this attempt registered under this name."""
        statement = select(Artifact).where(
            Artifact.attempt_id == attempt_id, Artifact.kind == kind, Artifact.name == name
        )
        return (await self._session.scalars(statement)).one_or_none()

    async def add_artifact(self, artifact: Artifact) -> None:
        """Register an artifact."""
        self._session.add(artifact)
        await self._session.flush()

    async def unclaimed_on(self, node_id: str, older_than: float) -> Sequence[Attempt]:
        """Attempts that were placed on a node so many seconds ago, and are not claimed."""
        statement = (
            select(Attempt)
            .where(Attempt.node_id == node_id, Attempt.status == "placed")
            .where(Attempt.created_at <= func.now() - seconds(older_than))
            .order_by(Attempt.created_at, Attempt.id)
        )
        return (await self._session.scalars(statement)).all()

    async def live_of_node(self, node_id: str) -> Sequence[Attempt]:
        """The attempts that are placed or running on a node."""
        statement = select(Attempt).where(Attempt.node_id == node_id, Attempt.status != "ended")
        return (await self._session.scalars(statement)).all()
