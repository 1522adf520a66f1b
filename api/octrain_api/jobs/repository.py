"""Jobs in the database."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Row, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import func

from octrain_api.jobs.transitions import Status
from octrain_api.models import Attempt, Job, Node, QueueGroup


@dataclass(frozen=True)
class JobFilter:
    """What a list is narrowed to."""

    statuses: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    name: str | None = None


class JobState(NamedTuple):
    """What a live stream needs to know of a job; no spec, no metrics."""

    owner: str
    status: str
    reason: str | None
    detail: str | None
    version: int
    sequence: int
    stream_floor: int
    step: int
    total_steps: int | None
    tokens: int
    eta_seconds: float | None


class JobRepository:
    """Reads, writes and locks jobs. `owner` None means every owner."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, job: Job) -> Job:
        """Store a new job."""
        self._session.add(job)
        await self._session.flush()
        return job

    async def get(self, job_id: str, owner: str | None) -> Job | None:
        """The job as it is committed now, if this owner may see it."""
        statement = select(Job).where(Job.id == job_id)
        if owner is not None:
            statement = statement.where(Job.owner == owner)
        statement = statement.execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def state(self, job_id: str) -> JobState | None:
        """The state of the job as it is committed now."""
        columns = [getattr(Job, name) for name in JobState._fields]
        row = (await self._session.execute(select(*columns).where(Job.id == job_id))).one_or_none()
        return JobState(*row) if row is not None else None

    async def lock(self, job_id: str, owner: str | None = None) -> Job | None:
        """The job, with its row locked. Lock a job before its attempt, never the other way."""
        statement = select(Job).where(Job.id == job_id)
        if owner is not None:
            statement = statement.where(Job.owner == owner)
        statement = statement.with_for_update().execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def find_idempotent(self, owner: str, key: str) -> Job | None:
        """The job that this owner made with this Idempotency-Key."""
        statement = select(Job).where(Job.owner == owner, Job.idempotency_key == key)
        return (await self._session.scalars(statement)).one_or_none()

    async def page(
        self,
        owner: str | None,
        job_filter: JobFilter,
        limit: int,
        after: tuple[datetime, str] | None,
    ) -> Sequence[Job]:
        """Up to `limit` jobs, newest first, older than the row `after`."""
        statement = select(Job).order_by(Job.created_at.desc(), Job.id.desc()).limit(limit)
        if owner is not None:
            statement = statement.where(Job.owner == owner)
        if job_filter.statuses:
            statement = statement.where(Job.status.in_(job_filter.statuses))
        if job_filter.labels:
            statement = statement.where(Job.labels.contains(dict(job_filter.labels)))
        if job_filter.name is not None:
            statement = statement.where(Job.name == job_filter.name)
        if after is not None:
            statement = statement.where(tuple_(Job.created_at, Job.id) < after)
        return (await self._session.scalars(statement)).all()

    async def attempts(self, job_ids: Sequence[str]) -> Sequence[Row[Attempt, str]]:
        """Every attempt of the jobs with its node's name, by number."""
        statement = (
            select(Attempt, Node.name)
            .join(Node, Node.id == Attempt.node_id)
            .where(Attempt.job_id.in_(job_ids))
            .order_by(Attempt.job_id, Attempt.number)
            .execution_options(populate_existing=True)
        )
        return (await self._session.execute(statement)).all()

    async def queue_positions(self, job_ids: Sequence[str]) -> dict[str, int]:
        """The place in the queue of those jobs that are queued, from 1."""
        if not job_ids:
            return {}
        ranked = (
            select(
                Job.id,
                func.row_number()
                .over(order_by=(Job.priority.desc(), Job.created_at, Job.id))
                .label("position"),
            )
            .where(Job.status == Status.QUEUED.value)
            .subquery()
        )
        statement = select(ranked.c.id, ranked.c.position).where(ranked.c.id.in_(job_ids))
        return {row.id: row.position for row in await self._session.execute(statement)}

    async def queue_groups(self, needs: Collection[str]) -> dict[str, QueueGroup]:
        """What the scheduler last said of the queued jobs of these needs."""
        if not needs:
            return {}
        statement = select(QueueGroup).where(QueueGroup.need.in_(needs))
        statement = statement.execution_options(populate_existing=True)
        return {group.need: group for group in await self._session.scalars(statement)}

    async def live_attempt(self, job_id: str) -> Attempt | None:
        """The job's one live attempt, locked."""
        statement = (
            select(Attempt)
            .where(Attempt.job_id == job_id, Attempt.status != "ended")
            .with_for_update()
            .execution_options(populate_existing=True)
        )
        return (await self._session.scalars(statement)).one_or_none()
