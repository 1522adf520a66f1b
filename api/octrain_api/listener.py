"""One LISTEN connection per process wakes the readers of live streams and long polls."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator

import psycopg
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import Database

log = logging.getLogger("octrain_api.listener")

JOB_CHANNEL = "octrain_job"
QUEUE_CHANNEL = "octrain_queue"


async def notify_job(session: AsyncSession, job_id: str) -> None:
    """Wake the readers of a job when this transaction commits."""
    await session.execute(select(func.pg_notify(JOB_CHANNEL, job_id)))


async def notify_queue(session: AsyncSession) -> None:
    """Wake the scheduler when this transaction commits."""
    await session.execute(select(func.pg_notify(QUEUE_CHANNEL, "")))


class JobListener:
    """Turns notifications of the database into wake-ups. A lost one costs a poll interval."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.closing = asyncio.Event()

    @contextlib.contextmanager
    def subscribe(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set at every change of the job, and when the process closes."""
        event = asyncio.Event()
        self._waiting[job_id].add(event)
        try:
            yield event
        finally:
            self._waiting[job_id].discard(event)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    def close(self) -> None:
        """Tell every reader to end now."""
        self.closing.set()
        self._wake_all()

    async def run(self) -> None:
        """Listen until cancelled, reconnecting for ever."""
        while True:
            try:
                connection = await self._database.connect()
                async with connection:
                    await connection.execute(f"LISTEN {JOB_CHANNEL}")
                    # Whatever was missed while there was no connection is read now.
                    self._wake_all()
                    async for notification in connection.notifies():
                        for event in self._waiting.get(notification.payload, ()):
                            event.set()
            except (psycopg.Error, OSError) as error:
                log.warning("listening to the database failed, trying again: %s", error)
                await asyncio.sleep(1)

    def _wake_all(self) -> None:
        for events in self._waiting.values():
            for event in events:
                event.set()


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set or the time is over, and clear it."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout=max(seconds, 0))
    event.clear()
