"""The feeds of this process: each is there while somebody reads it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from octrain_api.database import Database
from octrain_api.listener import KEY_CHANNEL, JobListener
from octrain_api.problems import Problem
from octrain_api.settings import HttpSettings
from octrain_api.streaming.feed import Feed, Shared
from octrain_api.streaming.messages import Choice, Position
from octrain_api.streaming.reader import Pace, Permission, StreamReader

log = logging.getLogger("octrain_api.streaming")

Part = TypeVar("Part", bound=Shared)

# Connections of the pool that streams may use at one time: requests need the others.
_READS = 4


@dataclass
class _Running:
    part: Shared
    task: asyncio.Task[None]
    users: int = 0


class Streams:
    """Feeds by what they tell, and the number of open streams."""

    def __init__(self, database: Database, listener: JobListener, settings: HttpSettings) -> None:
        self.database = database
        self.listener = listener
        self.settings = settings
        self.reads = asyncio.Semaphore(_READS)
        self.open_streams = 0
        self._parts: dict[Hashable, _Running] = {}
        self._key_changes = 0
        self._checks: dict[str, asyncio.Task[bool]] = {}
        listener.on_change(KEY_CHANNEL, lambda _: self._keys_changed())

    def admit(self) -> None:
        """Raise a problem when this process serves as many streams as it may."""
        if self.open_streams >= self.settings.stream_most:
            raise Problem(
                503,
                "too-many-streams",
                "Too many streams",
                f"This process serves {self.open_streams} streams and takes no more. Try again, "
                "or poll with `wait` or If-None-Match.",
                headers={"Retry-After": "5"},
            )

    def reader(
        self,
        key: Hashable,
        make: Callable[[], Feed[Position]],
        after: Position | None,
        choice: Choice,
        holds: Callable[[], Awaitable[bool]],
        most_seconds: float | None = None,
    ) -> StreamReader[Position]:
        """A reader of the feed of this key, for `most_seconds` at most and while `holds`."""
        lifetime = self.settings.stream_lifetime
        pace = Pace(
            keep_alive=self.settings.stream_keep_alive,
            lifetime=lifetime if most_seconds is None else min(lifetime, most_seconds),
        )
        permission = Permission(holds, lambda: self._key_changes)
        return StreamReader(self._counted(key, make), choice, after, pace, permission)

    async def still_holds(
        self, credential: str, read: Callable[[], Coroutine[Any, Any, bool]]
    ) -> bool:
        """What `read` says of a credential: read once for all who ask at the same time.

        A thousand streams of one key would else read the database a thousand times at once.
        """
        check = self._checks.get(credential)
        if check is None:
            check = self._checks[credential] = asyncio.create_task(read())
            check.add_done_callback(lambda done: self._checked(credential, done))
        return await asyncio.shield(check)

    def _checked(self, credential: str, check: asyncio.Task[bool]) -> None:
        if self._checks.get(credential) is check:
            del self._checks[credential]

    @contextlib.asynccontextmanager
    async def open(self, key: Hashable, make: Callable[[], Part]) -> AsyncIterator[Part]:
        """The part of this key, made and run if there is none; it has started."""
        running = self._parts.get(key)
        if running is None:
            part = make()
            running = self._parts[key] = _Running(part, asyncio.create_task(self._run(key, part)))
        running.users += 1
        try:
            await running.part.started.wait()
            yield cast(Part, running.part)
        finally:
            running.users -= 1
            if not running.users:
                running.task.cancel()
                self._forget(key, running.part)

    @contextlib.asynccontextmanager
    async def _counted(
        self, key: Hashable, make: Callable[[], Feed[Position]]
    ) -> AsyncIterator[Feed[Position]]:
        self.open_streams += 1
        try:
            async with self.open(key, make) as feed:
                yield feed
        finally:
            self.open_streams -= 1

    async def _run(self, key: Hashable, part: Shared) -> None:
        try:
            await part.run()
        except Exception:
            log.exception("the stream of %s broke off", key)
        finally:
            self._forget(key, part)
            part.close()

    def _keys_changed(self) -> None:
        self._key_changes += 1
        # What is being read may be what was before.
        self._checks.clear()
        for running in self._parts.values():
            running.part.wake()

    def _forget(self, key: Hashable, part: Shared) -> None:
        running = self._parts.get(key)
        if running is not None and running.part is part:
            del self._parts[key]
