"""One reader of a feed: from a position of the past to the present, and on.

Nothing is queued for a reader. It takes what it has room for: from the database while it is behind
the feed's ring, from the ring afterwards. A reader that was up to date and has fallen out of the
ring is told `gap`: the metrics of the gap are left out for it, so that it sees the present again;
status, events and log lines are read from the database and told in full.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Generic

from sqlalchemy.exc import SQLAlchemyError

from octrain_api.streaming.feed import Feed
from octrain_api.streaming.messages import RETRY, Choice, Kind, Message, Position, encode, joined

log = logging.getLogger("octrain_api.streaming")

# Bytes handed over at once. The server holds about as much again until the client takes it.
_CHUNK = 128 << 10

# Seconds between two looks at whether the key still holds.
_CHECK = 2.0


@dataclass(frozen=True)
class Pace:
    """Seconds between comments while nothing comes, and how long a connection may live."""

    keep_alive: float
    lifetime: float

    def lifetime_of_one(self) -> float:
        """A tenth more or less for each, so that they do not all come back at once."""
        return self.lifetime * random.uniform(0.9, 1.1)


class StreamReader(Generic[Position]):
    """Follows a feed from the position `after` on; without one, from where the feed says.

    `allowed` is asked now and then: a key may have been revoked since.
    """

    def __init__(
        self,
        opening: AbstractAsyncContextManager[Feed[Position]],
        choice: Choice,
        after: Position | None,
        pace: Pace,
        allowed: Callable[[], Awaitable[bool]],
    ) -> None:
        self._opening = opening
        self._choice = choice
        self._after = after
        self._pace = pace
        self._allowed = allowed
        self._gone = False

    def leave(self) -> None:
        """The client is gone."""
        self._gone = True
        if hasattr(self, "_feed"):
            self._feed.ring.wake()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The stream, some messages at a time."""
        yield RETRY
        async with self._opening as self._feed:
            self._position, first = self._feed.enter(self._after)
            # Its place in the ring; None while it reads the past.
            self._index: int | None = None
            # Up to here it reads without metrics.
            self._gap_end: Position | None = None
            self._told: Position | None = self._position if first else None
            if first:
                yield first
            async for chunk in self._follow():
                yield chunk

    async def _follow(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        ring = self._feed.ring
        sent_at = checked_at = clock()
        end_at = sent_at + self._pace.lifetime_of_one()
        while not self._gone:
            chunk = await self._next()
            now = clock()
            if chunk:
                yield chunk
                sent_at = now = clock()
            elif self._index == ring.next_index:
                if ring.end is not None:
                    yield ring.end
                    return
                if ring.closed:
                    return
                if now - sent_at >= self._pace.keep_alive:
                    yield self._keep_alive()
                    sent_at = now
                until = min(sent_at + self._pace.keep_alive, end_at, checked_at + _CHECK)
                await ring.changed(self._index, until - now)
                now = clock()
            if now >= end_at:
                yield encode("reconnect", {"after": self._feed.identifier(self._position)})
                return
            if now - checked_at >= _CHECK:
                if not await self._still_allowed():
                    return
                checked_at = now

    async def _next(self) -> bytes:
        ring = self._feed.ring
        if self._index is None:
            if self._position < ring.floor:
                return await self._from_the_past()
            self._index = ring.index_after(self._position)
            self._gap_end = None
            return self._feed.snapshot(self._choice)
        messages = ring.take(self._index, _CHUNK)
        if messages is None:
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
        self._index += len(messages)
        at_end = self._index == ring.next_index
        return self._tell(messages, ring.head if at_end else messages[-1].position, self._choice)

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
        return self._tell(page.messages, page.reached, choice)

    def _tell(
        self, messages: Sequence[Message[Position]], reached: Position, choice: Choice
    ) -> bytes:
        self._position = reached
        chunk = joined(messages, choice)
        if chunk:
            self._told = messages[-1].position
        return chunk

    def _keep_alive(self) -> bytes:
        """A comment; with the position, if that has moved on over what was not chosen."""
        if self._told == self._position:
            return b": keep-alive\n\n"
        self._told = self._position
        return f": keep-alive\nid: {self._feed.identifier(self._position)}\n\n".encode()

    async def _still_allowed(self) -> bool:
        try:
            return await self._allowed()
        except (SQLAlchemyError, OSError):
            return True
