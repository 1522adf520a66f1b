"""Jobs in the database."""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from octrain_api.database import psycopg_of
from octrain_api.models import Attempt, Job


@dataclass(frozen=True)
class JobFilter:
    """What a list is narrowed to. A window of time holds its first moment and not its last."""

    statuses: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    name: str | None = None
    text: str | None = None
    created: tuple[datetime | None, datetime | None] = (None, None)
    ended: tuple[datetime | None, datetime | None] = (None, None)

    def conditions(self, owner: str | None) -> tuple[list[str], dict[str, Any]]:
        """What SQL demands of a job of this owner, or of every one's, and the values in it."""
        values: dict[str, Any] = {}
        found = ["deleted_at IS NULL"]

        def demand(condition: str, value: Any) -> None:
            if value is not None and value != ():
                name = f"v{len(values)}"
                found.append(condition.format(f"%({name})s"))
                values[name] = value

        demand("owner = {}", owner)
        demand("status = ANY({}::text[])", list(self.statuses) or None)
        demand("labels @> {}::jsonb", json.dumps(dict(self.labels)) if self.labels else None)
        demand("name = {}", self.name)
        if self.text is not None:
            values["id_meant"] = self.text
            pattern = re.sub(r"([\\%_])", r"\\\1", self.text)
            demand("(name ILIKE {} OR id = %(id_meant)s)", f"%{pattern}%")
        for column, (first, end) in (("created_at", self.created), ("ended_at", self.ended)):
            demand(f"{column} >= {{}}", first)
            demand(f"{column} < {{}}", end)
        return found, values


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


# Their SQL and its type. Nothing stands where a job has no value: at the end of time, or before the
# first name.
ORDERS: dict[str, tuple[str, str]] = {
    "created_at": ("created_at", "timestamptz"),
    "ended_at": ("coalesce(ended_at, 'infinity'::timestamptz)", "timestamptz"),
    "priority": ("priority", "int"),
    "name": ("coalesce(name, '')", "text"),
    "status": ("status", "text"),
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

    async def head(self, job_id: str, owner: str | None) -> Job | None:
        """The job without its spec and its latest metrics, which are most of it."""
        large = [defer(column, raiseload=True) for column in (Job.spec, Job.latest_metrics)]
        statement = select(Job).where(Job.id == job_id, Job.deleted_at.is_(None)).options(*large)
        if owner is not None:
            statement = statement.where(Job.owner == owner)
        return (await self._session.scalars(statement)).one_or_none()

    async def read_given(self, job: Job) -> None:
        """Read what was written of the job's spec, which few need of a job."""
        await self._session.refresh(job, ["spec_given"])

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

    async def ids(self, owner: str | None, job_filter: JobFilter, limit: int) -> list[str]:
        """The newest jobs that the filter finds."""
        where, values = job_filter.conditions(owner)
        order = "ORDER BY created_at DESC, id DESC LIMIT %(limit)s"
        # The conditions are constants; what was asked for are their parameters.
        statement = f"SELECT id FROM jobs WHERE {' AND '.join(where)} {order}"  # noqa: S608
        connection = await psycopg_of(self._session)
        found = await connection.execute(statement, values | {"limit": limit})
        return [row[0] for row in await found.fetchall()]

    async def live_attempt(self, job_id: str) -> Attempt | None:
        """The job's one live attempt, locked."""
        statement = (
            select(Attempt)
            .where(Attempt.job_id == job_id, Attempt.status != "ended")
            .with_for_update()
            .execution_options(populate_existing=True)
        )
        return (await self._session.scalars(statement)).one_or_none()
