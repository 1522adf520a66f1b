"""Events in the database."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Row, cast, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.types import Text

from octrain_api.events.order import EventPosition
from octrain_api.listener import notify_job
from octrain_api.models import Event, Job


class EventRepository:
    """Appends and reads events. The caller holds the job's row lock when it appends."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def append(
        self,
        job: Job,
        *,
        kind: str,
        actor: str,
        message: str,
        attempt: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> Event:
        """Give the event the job's next number and make the change visible to readers."""
        job.sequence += 1
        job.version += 1
        event = Event(
            job_id=job.id,
            seq=job.sequence,
            kind=kind,
            actor=actor,
            message=message,
            attempt=attempt,
            data=data or {},
        )
        self._session.add(event)
        await self._session.flush()
        await notify_job(self._session, job.id)
        return event

    async def page(
        self,
        job_id: str,
        limit: int,
        *,
        kinds: Sequence[str] = (),
        after: int | None = None,
        before: int | None = None,
        newest_first: bool = False,
    ) -> Sequence[Event]:
        """Up to `limit` events of these kinds numbered in (after, before), by number.

        With `newest_first` the last ones, in falling order; otherwise the first ones.
        """
        statement = select(Event).where(Event.job_id == job_id).limit(limit)
        if kinds:
            statement = statement.where(Event.kind.in_(kinds))
        if after is not None:
            statement = statement.where(Event.seq > after)
        if before is not None:
            statement = statement.where(Event.seq < before)
        statement = statement.order_by(Event.seq.desc() if newest_first else Event.seq)
        return (await self._session.scalars(statement)).all()

    async def list_between(
        self, job_id: str, after: int, until: int, limit: int
    ) -> Sequence[Event]:
        """The first events numbered in (after, until]."""
        return await self.page(job_id, limit, after=after, before=until + 1)

    async def oldest_open(self) -> int:
        """The number below which every transaction has ended; what they wrote is seen here."""
        oldest = func.pg_snapshot_xmin(func.pg_current_snapshot())
        number = cast(cast(oldest, Text), BigInteger)
        return int((await self._session.execute(select(number))).scalar_one())

    async def list_in_order(
        self, after: EventPosition, owner: str | None, limit: int
    ) -> Sequence[Row[Event, str]]:
        """(event, its job's owner) after a position, in the order of all jobs' events.

        What was written by a transaction not below `oldest_open` of the same snapshot is not
        final: another may yet come before it.
        """
        place = tuple_(Event.transaction_id, Event.job_id, Event.seq)
        statement = (
            select(Event, Job.owner)
            .join(Job, Job.id == Event.job_id)
            .where(place > (after.transaction, after.job_id, after.seq))
            .order_by(Event.transaction_id, Event.job_id, Event.seq)
            .limit(limit)
        )
        if owner is not None:
            statement = statement.where(Job.owner == owner)
        return (await self._session.execute(statement)).all()
