"""The newest messages of one stream, shared by all its readers.

Readers keep only their place in it, so a slow one costs no memory: when its place has left the ring
it reads on from the database.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic

from octrain_api.streaming.messages import Message, Position


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
        # No more will come, and nobody is told why: the job is gone, or the process closes.
        self.closed = False
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: list[Message[Position]] = []
        self._first = 0
        self._bytes = 0
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def next_index(self) -> int:
        """The index that the next message will have."""
        return self._first + len(self._messages)

    def append(self, messages: Sequence[Message[Position]], head: Position) -> None:
        """Add messages, which reach up to `head`, and wake the readers."""
        self.head = head
        self._messages += messages
        self._bytes += sum(message.size for message in messages)
        while self._messages and (
            len(self._messages) > self._max_messages or self._bytes > self._max_bytes
        ):
            self._drop(max(len(self._messages) // 4, 1))
        self.wake()

    def finish(self, end: bytes | None) -> None:
        """Nothing comes any more; `end` is what readers are told then."""
        self.end = end
        self.closed = end is None
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

    async def changed(self, index: int, seconds: float) -> None:
        """Return when there is a message with this index, an end, or the time is over."""
        if index < self.next_index or self.end is not None or self.closed:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = loop.call_later(max(seconds, 0.0), _set, waiter)
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)

    def wake(self) -> None:
        """Let every waiting reader look again."""
        waiting, self._waiting = self._waiting, set()
        for waiter in waiting:
            _set(waiter)

    def _drop(self, count: int) -> None:
        gone = self._messages[:count]
        del self._messages[:count]
        self._first += count
        self._bytes -= sum(message.size for message in gone)
        self.floor = gone[-1].position


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
