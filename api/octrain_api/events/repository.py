"""Events in the database."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

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

    async def list_after(self, job_id: str, after: int, limit: int) -> Sequence[Event]:
        """Events with a number above `after`, in order."""
        statement = (
            select(Event)
            .where(Event.job_id == job_id, Event.seq > after)
            .order_by(Event.seq)
            .limit(limit)
        )
        return (await self._session.scalars(statement)).all()
