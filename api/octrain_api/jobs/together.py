"""New jobs that come at the same time are stored by one statement, and share one wait for the disk.

While one statement is at work those that come meanwhile gather for the next. The first of all goes
at once; so a lone request is as fast as by itself, and the more there are the less each one costs.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import psycopg

from octrain_api.direct import Connection
from octrain_api.jobs.submission import Stored, Submission, store

# So many statements are at work before others wait for them: while the database works at one the
# process reads and answers the requests of the other.
_AT_ONCE = 2
# Whoever waits for statements that take longer than that goes by another connection.
_PATIENCE = 0.02
# Of one statement.
_MOST_JOBS = 32
_MOST_CHARACTERS = 1_000_000
# Seconds for which the queue is as long as it was found to be.
_CROWDED = 0.5


@dataclass(eq=False)
class _Waiting:
    submission: Submission
    characters: int
    stored: asyncio.Future[Stored]


class StoredTogether:
    """Stores the jobs of one process over connections that commit each statement."""

    def __init__(self, connection: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
        self._connection = connection
        self._waiting: list[_Waiting] = []
        # The statements that others wait for, and all that are at work.
        self._awaited: set[asyncio.Task[None]] = set()
        self._working: set[asyncio.Task[None]] = set()
        self._crowded = (0, float("-inf"))

    async def store(self, submission: Submission) -> Stored:
        """Store a job; what became of it. Raises psycopg.Error."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(submission, len(submission.asked), loop.create_future())
        self._waiting.append(waiting)
        # Not yet: what has come with this one is about to be read.
        loop.call_soon(self._begin)
        return await waiting.stored

    def _begin(self) -> None:
        """Begin with those that wait, unless they wait for statements that will not take long."""
        if not self._waiting or len(self._awaited) >= _AT_ONCE:
            return
        task = asyncio.create_task(self._work(self._batch()))
        self._awaited.add(task)
        self._working.add(task)
        timer = asyncio.get_running_loop().call_later(_PATIENCE, self._await_no_longer, task)
        task.add_done_callback(self._working.discard)
        task.add_done_callback(lambda _: timer.cancel())
        task.add_done_callback(self._await_no_longer)

    def _await_no_longer(self, task: asyncio.Task[None]) -> None:
        if task in self._awaited:
            self._awaited.remove(task)
            self._begin()

    def _batch(self) -> list[_Waiting]:
        """The first of those that wait, no two of them under one Idempotency-Key."""
        batch: list[_Waiting] = []
        left: list[_Waiting] = []
        locks: set[str] = set()
        characters = 0
        for waiting in self._waiting:
            kept = waiting.submission.kept
            characters += waiting.characters
            is_full = len(batch) >= _MOST_JOBS or (batch and characters > _MOST_CHARACTERS)
            if is_full or (kept is not None and kept.lock in locks):
                left.append(waiting)
                continue
            batch.append(waiting)
            if kept is not None:
                locks.add(kept.lock)
        self._waiting = left
        return batch

    async def _work(self, batch: list[_Waiting]) -> None:
        try:
            stored = await self._stored([waiting.submission for waiting in batch])
        except Exception as error:
            if len(batch) > 1 and _is_of_one(error):
                # Nothing of it was stored. Each by itself: only one has to suffer.
                await asyncio.gather(*(self._work([waiting]) for waiting in batch))
                return
            for waiting in batch:
                if not waiting.stored.done():
                    waiting.stored.set_exception(error)
            return
        for waiting, result in zip(batch, stored, strict=True):
            if not waiting.stored.done():
                waiting.stored.set_result(result)

    async def _stored(self, submissions: list[Submission]) -> list[Stored]:
        priority, until = self._crowded
        crowded = priority if time.monotonic() < until else None
        async with self._connection() as connection:
            stored = await store(connection, submissions, crowded)
        if crowded is None:
            beyond = [
                submission.job.spec["priority"]
                for submission, result in zip(submissions, stored, strict=True)
                if submission.is_queued and result.row is not None and result.row.position is None
            ]
            if beyond:
                self._crowded = (max(beyond), time.monotonic() + _CROWDED)
        return stored


def _is_of_one(error: Exception) -> bool:
    """Whether the database refused the statement for what one of the jobs brought."""
    return isinstance(error, psycopg.DataError | psycopg.IntegrityError)
