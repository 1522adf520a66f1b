"""Jobs in the database."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Row, SQLColumnExpression, literal_column, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import func

from octrain_api.jobs.transitions import Status
from octrain_api.models import Attempt, Job, Node, QueueGroup


@dataclass(frozen=True)
class JobFilter:
    """What a list is narrowed to. A window of time holds its first moment and not its last."""

    statuses: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    name: str | None = None
    text: str | None = None
    created: tuple[datetime | None, datetime | None] = (None, None)
    ended: tuple[datetime | None, datetime | None] = (None, None)


@dataclass(frozen=True)
class JobOrder:
    """By which of `ORDERS` a list is sorted; jobs that are equal in it by id."""

    column: str = "created_at"
    descending: bool = True

    def __str__(self) -> str:
        return f"-{self.column}" if self.descending else self.column

    @classmethod
    def parse(cls, text: str) -> "JobOrder":
        """The order of this text: a column, with a minus for descending."""
        return cls(text.removeprefix("-"), text.startswith("-"))


# Nothing stands where a job has no value: at the end of time, or before the first name.
ORDERS: dict[str, SQLColumnExpression[Any]] = {
    "created_at": Job.created_at,
    "ended_at": func.coalesce(Job.ended_at, literal_column("'infinity'::timestamptz")),
    "priority": Job.priority,
    "name": func.coalesce(Job.name, ""),
    "status": Job.status,
}


NEWEST_FIRST = JobOrder()

# Places in the queue are counted so far: whoever asks for one costs no more than that.
FARTHEST_POSITION = 1000


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

    async def get(self, job_id: str, owner: str | None) -> Job | None:
        """The job as it is committed now, if this owner may see it."""
        statement = select(Job).where(Job.id == job_id, Job.deleted_at.is_(None))
        if owner is not None:
            statement = statement.where(Job.owner == owner)
        statement = statement.execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def state(self, job_id: str) -> JobState | None:
        """The state of the job as it is committed now."""
        columns = [getattr(Job, name) for name in JobState._fields]
        statement = select(*columns).where(Job.id == job_id, Job.deleted_at.is_(None))
        row = (await self._session.execute(statement)).one_or_none()
        return JobState(*row) if row is not None else None

    async def lock(self, job_id: str, owner: str | None = None) -> Job | None:
        """The job, with its row locked. Lock a job before its attempt, never the other way."""
        statement = select(Job).where(Job.id == job_id, Job.deleted_at.is_(None))
        if owner is not None:
            statement = statement.where(Job.owner == owner)
        statement = statement.with_for_update().execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def trail(self, job_id: str, owner: str | None) -> Job | None:
        """The job, or what is left of it once it is deleted."""
        statement = select(Job).where(Job.id == job_id)
        if owner is not None:
            statement = statement.where(Job.owner == owner)
        return (await self._session.scalars(statement)).one_or_none()

    async def using_model_of(self, job_id: str) -> str | None:
        """A job that has not ended and begins with the model of this one."""
        statement = (
            select(Job.id)
            .where(Job.spec["model"]["job"].astext == job_id, Job.ended_at.is_(None))
            .where(Job.deleted_at.is_(None))
            .limit(1)
        )
        return await self._session.scalar(statement)

    async def page(
        self,
        owner: str | None,
        job_filter: JobFilter,
        limit: int,
        after: tuple[Any, str] | None,
        order: JobOrder = NEWEST_FIRST,
    ) -> Sequence[Job]:
        """Up to `limit` jobs in this order, behind the row (value of the order, id) `after`."""
        column = ORDERS[order.column]
        keys = (column.desc(), Job.id.desc()) if order.descending else (column, Job.id)
        statement = select(Job).where(Job.deleted_at.is_(None)).order_by(*keys).limit(limit)
        if owner is not None:
            statement = statement.where(Job.owner == owner)
        if job_filter.statuses:
            statement = statement.where(Job.status.in_(job_filter.statuses))
        if job_filter.labels:
            statement = statement.where(Job.labels.contains(dict(job_filter.labels)))
        if job_filter.name is not None:
            statement = statement.where(Job.name == job_filter.name)
        if job_filter.text is not None:
            found = Job.name.icontains(job_filter.text, autoescape=True)
            statement = statement.where(found | (Job.id == job_filter.text))
        for time, (first, end) in (
            (Job.created_at, job_filter.created),
            (Job.ended_at, job_filter.ended),
        ):
            if first is not None:
                statement = statement.where(time >= first)
            if end is not None:
                statement = statement.where(time < end)
        if after is not None:
            row, last = tuple_(column, Job.id), tuple_(*after)
            statement = statement.where(row < last if order.descending else row > last)
        return (await self._session.scalars(statement)).all()

    @staticmethod
    def order_value(job: Job, order: JobOrder) -> datetime | int | str | None:
        """What the job is sorted by; None for the end of time."""
        value: datetime | int | str | None = getattr(job, order.column)
        return "" if value is None and order.column == "name" else value

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
        """The place in the queue, from 1, of those jobs that have one of its first 1,000."""
        if not job_ids:
            return {}
        order = (Job.priority.desc(), Job.created_at, Job.id)
        queue = select(Job.id, Job.priority, Job.created_at)
        queue = queue.where(Job.status == Status.QUEUED.value)
        first = queue.order_by(*order).limit(FARTHEST_POSITION).subquery()
        rank = func.row_number().over(
            order_by=(first.c.priority.desc(), first.c.created_at, first.c.id)
        )
        ranked = select(first.c.id, rank.label("position")).subquery()
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
