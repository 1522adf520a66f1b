"""One LISTEN connection per process wakes the readers of live streams and long polls, and tells the
caches what is no longer true.

The database tells of a change when its transaction commits, and in that order. The connection
also tells itself something every `_PING` seconds: when that is heard, everything committed before
it was told has been heard too. So a silent connection, broken or not, is noticed, and whoever keeps
something in memory knows how old its truth can be (`is_current`).
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator

import psycopg
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import Database
from octrain_api.models import Job
from octrain_api.tasks import end_tasks

log = logging.getLogger("octrain_api.listener")

JOB_CHANNEL = "octrain_job"
KEY_CHANNEL = "octrain_key"
QUEUE_CHANNEL = "octrain_queue"

# Seconds between the pings, and how long one may be unanswered before nothing is certain any more.
_PING = 0.5
_CERTAIN = 2.0
# Seconds within which what is told after commits is told at once.
_TOGETHER = 0.02
_CHANGES = "octrain_changes"
_LATER = "octrain_later"

_TELL = """
    SELECT pg_notify(channel, subject) FROM unnest(%s::text[], %s::text[]) AS t(channel, subject)
"""

Heard = Callable[[str | None], None]


async def notify_job(session: AsyncSession, job_id: str) -> None:
    """Wake the readers of a job when this transaction commits."""
    await _notify(session, JOB_CHANNEL, job_id)


async def notify_key(session: AsyncSession, key_id: str) -> None:
    """Tell every process, when this transaction commits, that a key is not what it was."""
    await _notify(session, KEY_CHANNEL, key_id)


async def notify_queue(session: AsyncSession) -> None:
    """Wake the scheduler when this transaction commits."""
    await session.execute(select(func.pg_notify(QUEUE_CHANNEL, "")))


def tell_after_commit(session: AsyncSession, channel: str, subject: str) -> None:
    """Notify once this request is committed, in a transaction that many share.

    For what is found without it as well, a little later: the process may end in between.
    """
    session.info.setdefault(_LATER, set()).add((channel, subject))


async def _notify(session: AsyncSession, channel: str, subject: str) -> None:
    session.info.setdefault(_CHANGES, set()).add((channel, subject))
    await session.execute(select(func.pg_notify(channel, subject)))


class JobListener:
    """Turns notifications of the database into wake-ups.

    A lost notification costs `poll` seconds: so often the versions of all jobs that somebody
    waits for are compared, in one query for all of them.
    """

    def __init__(self, database: Database, poll: float = 2.0) -> None:
        self._database = database
        self._poll = poll
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._waiting_for_any: set[asyncio.Event] = set()
        self._versions: dict[str, int] = {}
        self._hearers: dict[str, list[Heard]] = {JOB_CHANNEL: [], KEY_CHANNEL: []}
        self._ping_channel = f"octrain_ping_{uuid.uuid4().hex}"
        self._certain_from = float("-inf")
        self._untold: set[tuple[str, str]] = set()
        self._tell = asyncio.Event()
        self.closing = asyncio.Event()

    @property
    def is_current(self) -> bool:
        """Whether all that was committed until 2 seconds ago has been heard."""
        return time.monotonic() - self._certain_from <= _CERTAIN

    def on_change(self, channel: str, heard: Heard) -> None:
        """Call `heard` with every job or key that changed; with None when any may have."""
        self._hearers[channel].append(heard)

    def forget_changes_of(self, session: AsyncSession) -> None:
        """What a session of this process has committed is known here at once.

        What was to be told after the commit is told now.
        """
        for channel, subject in session.info.pop(_CHANGES, ()):
            for heard in self._hearers[channel]:
                heard(subject)
        later = session.info.pop(_LATER, None)
        if later:
            self._untold |= later
            self._tell.set()

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
                self._versions.pop(job_id, None)

    @contextlib.contextmanager
    def subscribe_to_any(self) -> Iterator[asyncio.Event]:
        """An event that is set at every change of any job, and when the process closes."""
        event = asyncio.Event()
        self._waiting_for_any.add(event)
        try:
            yield event
        finally:
            self._waiting_for_any.discard(event)

    def close(self) -> None:
        """Tell every reader to end now."""
        self.closing.set()
        self._wake_all()

    async def run(self) -> None:
        """Listen and poll until cancelled, reconnecting for ever."""
        loops = (self._listen_for_ever(), self._poll_for_ever(), self._tell_for_ever())
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            # Each cancellation of this task reaches all of them. A TaskGroup hands on the first one
            # only, and then waits for ever for a task whose driver has swallowed that one.
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)

    async def _listen_for_ever(self) -> None:
        while True:
            try:
                connection = await self._database.connect()
                async with connection:
                    for channel in (*self._hearers, self._ping_channel):
                        await connection.execute(f'LISTEN "{channel}"')
                    # Whatever was missed while there was no connection is read now.
                    self._lost()
                    self._wake_all()
                    await self._listen(connection)
            except (psycopg.Error, OSError) as error:
                log.warning("listening to the database failed, trying again: %s", error)
                self._lost()
                await asyncio.sleep(1)

    async def _listen(self, connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        while True:
            sent_at = time.monotonic()
            await connection.execute(
                "SELECT pg_notify(%s, %s)", (self._ping_channel, repr(sent_at))
            )
            async for told in connection.notifies(timeout=_PING):
                if told.channel == self._ping_channel:
                    self._certain_from = float(told.payload)
                    continue
                for heard in self._hearers[told.channel]:
                    heard(told.payload)
                if told.channel == JOB_CHANNEL:
                    self._wake(told.payload)

    def _lost(self) -> None:
        self._certain_from = float("-inf")
        for hearers in self._hearers.values():
            for heard in hearers:
                heard(None)

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._poll)
            for event in self._waiting_for_any:
                event.set()
            if not self._waiting:
                continue
            try:
                await self._compare_versions()
            except (SQLAlchemyError, OSError) as error:
                log.warning("the versions of jobs cannot be read: %s", error)

    async def _tell_for_ever(self) -> None:
        while True:
            await self._tell.wait()
            self._tell.clear()
            told, self._untold = self._untold, set()
            channels, subjects = zip(*told, strict=True)
            try:
                async with self._database.direct() as connection:
                    await connection.execute(_TELL, (list(channels), list(subjects)))
            except (psycopg.Error, OSError) as error:
                # Whoever was to be told looks for itself every second or two.
                log.warning("%s notifications could not be sent: %s", len(told), error)
            # What is committed meanwhile is told together.
            await asyncio.sleep(_TOGETHER)

    async def _compare_versions(self) -> None:
        statement = select(Job.id, Job.version).where(Job.id.in_(list(self._waiting)))
        async with self._database.session() as session:
            versions = {row.id: row.version for row in await session.execute(statement)}
        for job_id in list(self._waiting):
            version = versions.get(job_id, 0)
            if self._versions.get(job_id) != version:
                self._versions[job_id] = version
                self._wake(job_id)

    def _wake(self, job_id: str) -> None:
        for event in self._waiting.get(job_id, ()):
            event.set()
        for event in self._waiting_for_any:
            event.set()

    def _wake_all(self) -> None:
        for events in self._waiting.values():
            for event in events:
                event.set()
        for event in self._waiting_for_any:
            event.set()


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set or the time is over, and clear it."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout=max(seconds, 0))
    event.clear()
