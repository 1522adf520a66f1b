"""One reader of a feed: from a position of the past to the present, and on.

Nothing is queued for a reader. It takes what it has room for: from the database while it is behind
the feed's ring, from the ring afterwards. A reader that was up to date and has fallen out of the
ring is told `gap`: the metrics of the gap are left out for it, so that it sees the present again;
status, events and log lines are read from the database and told in full.

A reader that has been told everything waits as a follower of the ring. What comes is then handed to
its connection at once, without waking its task, if the connection has taken all that came before.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Generic

from sqlalchemy.exc import SQLAlchemyError

from octrain_api.streaming.feed import Feed
from octrain_api.streaming.messages import RETRY, Choice, Kind, Position, encode, joined

log = logging.getLogger("octrain_api.streaming")

# Returns once the server has taken the bytes, which it does when the client has taken those before.
Write = Callable[[bytes], Awaitable[None]]
# The same at once, or not at all: whether the bytes were taken.
Offer = Callable[[bytes], bool]

# Bytes handed over at once. The server holds about as much again until the client takes it.
_CHUNK = 128 << 10

# Seconds between two looks at whether the key still holds, if nothing is heard of keys.
_CHECK = 15.0


@dataclass(frozen=True)
class Permission:
    """Whether a reader may go on: to be asked when `changes` gives another number than before."""

    holds: Callable[[], Awaitable[bool]]
    changes: Callable[[], int]


@dataclass(frozen=True)
class Pace:
    """Seconds between comments while nothing comes, and how long a connection may live."""

    keep_alive: float
    lifetime: float

    def lifetime_of_one(self) -> float:
        """A tenth more or less for each, so that they do not all come back at once."""
        return self.lifetime * random.uniform(0.9, 1.1)


class StreamReader(Generic[Position]):
    """Follows a feed from the position `after` on; without one, from where the feed says."""

    def __init__(
        self,
        opening: AbstractAsyncContextManager[Feed[Position]],
        choice: Choice,
        after: Position | None,
        pace: Pace,
        permission: Permission,
    ) -> None:
        self._opening = opening
        self._choice = choice
        self._after = after
        self._pace = pace
        self._permission = permission
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._clock = asyncio.get_running_loop().time
        self._sent_at = 0.0
        self._key_changes = permission.changes()

    def leave(self) -> None:
        """The client is gone."""
        self._gone = True
        self.wake()

    async def run(self, write: Write, offer: Offer) -> None:
        """Write the stream, some messages at a time, to its end."""
        self._offer = offer
        await write(RETRY)
        async with self._opening as self._feed:
            self._position, first = self._feed.enter(self._after)
            # Its place in the ring; None while it reads the past.
            self._index: int | None = None
            # Up to here it reads without metrics.
            self._gap_end: Position | None = None
            self._told: Position | None = self._position if first else None
            if first:
                await write(first)
            try:
                await self._follow(write)
            finally:
                if self._timer is not None:
                    self._timer.cancel()

    async def _follow(self, write: Write) -> None:
        ring = self._feed.ring
        self._sent_at = self._clock()
        # Streams that begin together are not checked together.
        checked_at = self._sent_at - random.uniform(0, _CHECK)
        end_at = self._sent_at + self._pace.lifetime_of_one()
        while not self._gone:
            now = self._clock()
            if now >= end_at:
                after = self._feed.identifier(self._position)
                await write(encode("reconnect", {"after": after}))
                return
            if now - checked_at >= _CHECK or self._key_changes != self._permission.changes():
                self._key_changes, checked_at = self._permission.changes(), now
                if not await self._still_allowed():
                    return
            chunk = await self._next()
            if chunk:
                await write(chunk)
                self._sent_at = self._clock()
            elif self._index == ring.next_index:
                # From here to the wait nothing may be awaited: a change would be missed.
                if ring.end is not None:
                    await write(ring.end)
                    return
                if ring.closed:
                    return
                if now - self._sent_at >= self._pace.keep_alive:
                    await write(self._keep_alive())
                    self._sent_at = self._clock()
                else:
                    silent_until = self._sent_at + self._pace.keep_alive
                    await self._wait(min(silent_until, end_at, checked_at + _CHECK))

    async def _next(self) -> bytes:
        ring = self._feed.ring
        if self._index is None:
            if self._position < ring.floor:
                return await self._from_the_past()
            self._index = ring.index_after(self._position)
            self._gap_end = None
            return self._feed.snapshot(self._choice)
        chunk = ring.chunk(self._index, self._choice, _CHUNK)
        if chunk is None:
            self._index = None
            if Kind.METRICS not in self._choice.kinds:
                return b""
            self._gap_end = ring.floor
            return encode(
                "gap",
                {
                    "kinds": [Kind.METRICS],
                    "after": self._feed.identifier(self._position),
                    "until": self._feed.identifier(ring.floor),
                },
            )
        self._index, self._position = chunk.after, chunk.reached
        if chunk.encoded:
            self._told = chunk.reached
        return chunk.encoded

    async def _from_the_past(self) -> bytes:
        until, choice = self._feed.ring.floor, self._choice
        if self._gap_end is not None and self._position < self._gap_end:
            until, choice = self._gap_end, replace(choice, kinds=choice.kinds - {Kind.METRICS})
        try:
            page = await self._feed.history(self._position, until, choice)
        except (SQLAlchemyError, OSError) as error:
            log.warning("a stream waits for the database: %s", error)
            await asyncio.sleep(1)
            return b""
        self._position = page.reached
        chunk = joined(page.messages, choice)
        if chunk:
            self._told = page.messages[-1].position
        return chunk

    async def _wait(self, until: float) -> None:
        """Return when there is something to do, or when it is later than `until`.

        The timer of an earlier wait is left to run: most waits end long before it.
        """
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        if self._timer is None or self._timer_at > until:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(max(until, loop.time()), self._time_is_over)
            self._timer_at = until
        ring = self._feed.ring
        ring.follow(self)
        try:
            await waiter
        finally:
            ring.forget(self)

    def advance(self) -> None:
        """Hand on what the ring has now, if nothing stands in the way; else wake the task."""
        if self._waiter is None or self._waiter.done():
            return
        ring = self._feed.ring
        assert self._index is not None
        chunk = ring.chunk(self._index, self._choice, _CHUNK)
        if chunk is None or chunk.after != ring.next_index or not self._hand_on(chunk.encoded):
            self.wake()
            return
        self._index, self._position = chunk.after, chunk.reached
        if chunk.encoded:
            self._told, self._sent_at = chunk.reached, self._clock()

    def _hand_on(self, encoded: bytes) -> bool:
        if self._gone or self._key_changes != self._permission.changes():
            return False
        return not encoded or self._offer(encoded)

    def wake(self) -> None:
        """Let the task look at everything."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _time_is_over(self) -> None:
        self._timer = None
        self.wake()

    def _keep_alive(self) -> bytes:
        """A comment; with the position, if that has moved on over what was not chosen."""
        if self._told == self._position:
            return b": keep-alive\n\n"
        self._told = self._position
        return f": keep-alive\nid: {self._feed.identifier(self._position)}\n\n".encode()

    async def _still_allowed(self) -> bool:
        try:
            return await self._permission.holds()
        except (SQLAlchemyError, OSError):
            return True
