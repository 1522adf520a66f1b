"""The newest messages of one stream, shared by all its readers.

Readers keep only their place in it, so a slow one costs no memory: when its place has left the ring
it reads on from the database. Those that have been told everything are told of what comes in one
pass, at once (`Follower`): a thousand of them cost no thousand wake-ups.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol

from octrain_api.streaming.messages import Choice, Message, Position, joined


class Follower(Protocol):
    """Who waits for what comes next. Neither method may change who follows."""

    def advance(self) -> None:
        """There is more."""
        ...

    def wake(self) -> None:
        """Something else is not as it was."""
        ...


class Chunk(NamedTuple, Generic[Position]):
    """What a reader is told at one time, its next place, and the position that it has reached."""

    encoded: bytes
    after: int
    reached: Position


class Ring(Generic[Position]):
    """Messages in order, the oldest dropped first, at most `max_messages` and about `max_bytes`.

    `floor` is the position after which every message is here, `head` the one up to which the stream
    has been read. Messages of equal position stay in the order in which they came.
    """

    def __init__(
        self, start: Position, *, max_messages: int = 1024, max_bytes: int = 2 << 20
    ) -> None:
        self.floor = start
        self.head = start
        # What every reader is told last, once it has been told everything else.
        self.end: bytes | None = None
        self._closed = asyncio.Event()
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: list[Message[Position]] = []
        self._first = 0
        self._bytes = 0
        self._followers: set[Follower] = set()
        self._chunks: dict[tuple[int, Choice], Chunk[Position]] = {}

    @property
    def next_index(self) -> int:
        """The index that the next message will have."""
        return self._first + len(self._messages)

    @property
    def closed(self) -> bool:
        """No more will come, and nobody is told why: the job is gone, or the process closes."""
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        """Return when it is closed."""
        await self._closed.wait()

    def append(self, messages: Sequence[Message[Position]], head: Position) -> None:
        """Add messages, which reach up to `head`, and tell the followers."""
        self.head = head
        self._chunks.clear()
        self._messages += messages
        self._bytes += sum(message.size for message in messages)
        while self._messages and (
            len(self._messages) > self._max_messages or self._bytes > self._max_bytes
        ):
            self._drop(max(len(self._messages) // 4, 1))
        for follower in self._followers:
            follower.advance()

    def finish(self, end: bytes | None) -> None:
        """Nothing comes any more; `end` is what readers are told then."""
        self.end = end
        if end is None:
            self._closed.set()
        self.wake()

    def index_after(self, position: Position) -> int:
        """The index of the first message after `position`, which is not before `floor`."""
        return self._first + bisect_right(
            self._messages, position, key=lambda message: message.position
        )

    def take(self, index: int, max_bytes: int) -> Sequence[Message[Position]] | None:
        """Messages from `index` on, at least one if there is one; None when it has left."""
        if index < self._first:
            return None
        taken: list[Message[Position]] = []
        total = 0
        for message in self._messages[index - self._first :]:
            taken.append(message)
            total += message.size
            if total >= max_bytes:
                break
        return taken

    def chunk(self, index: int, choice: Choice, max_bytes: int) -> Chunk[Position] | None:
        """What a reader at `index` is told next; None when it has left.

        Most readers of a stream are at one place and chose the same: they share the answer.
        """
        key = (index, choice)
        found = self._chunks.get(key)
        if found is None:
            messages = self.take(index, max_bytes)
            if messages is None:
                return None
            after = index + len(messages)
            at_end = after == self.next_index
            reached = self.head if at_end or not messages else messages[-1].position
            found = self._chunks[key] = Chunk(joined(messages, choice), after, reached)
        return found

    def follow(self, follower: Follower) -> None:
        """Tell it of what comes, until it is forgotten."""
        self._followers.add(follower)

    def forget(self, follower: Follower) -> None:
        """It is not to be told any more."""
        self._followers.discard(follower)

    def wake(self) -> None:
        """Let every follower look again."""
        for follower in self._followers:
            follower.wake()

    def _drop(self, count: int) -> None:
        gone = self._messages[:count]
        del self._messages[:count]
        self._first += count
        self._bytes -= sum(message.size for message in gone)
        self.floor = gone[-1].position
