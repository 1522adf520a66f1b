"""A feed: one stream as this process reads it, once for all who follow it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from octrain_api.streaming.messages import Choice, Message, Position
from octrain_api.streaming.ring import Ring


@dataclass(frozen=True)
class Page(Generic[Position]):
    """Messages read from the database, which reach up to `reached`."""

    messages: Sequence[Message[Position]]
    reached: Position


class Shared(ABC):
    """Something that this process reads once for all who use it."""

    def __init__(self) -> None:
        self.started = asyncio.Event()

    @abstractmethod
    async def run(self) -> None:
        """Set `started`, and read until cancelled, whatever fails on the way."""

    @abstractmethod
    def close(self) -> None:
        """`run` has ended: so must those who use it."""

    @abstractmethod
    def wake(self) -> None:
        """Let those who use it look again."""


class Feed(Shared, Generic[Position]):
    """Reads what is new into `ring` while `run` runs; what is older can be read by `history`.

    `ring` is there once it has started.
    """

    ring: Ring[Position]

    def close(self) -> None:
        """End the readers that have not been told the end; their clients come back."""
        if self.started.is_set() and self.ring.end is None:
            self.ring.finish(None)

    def wake(self) -> None:
        """Let the readers look again."""
        if self.started.is_set():
            self.ring.wake()

    @abstractmethod
    async def history(self, after: Position, until: Position, choice: Choice) -> Page[Position]:
        """The first messages in (after, until]: `reached` is above `after`."""

    @abstractmethod
    def enter(self, after: Position | None) -> tuple[Position, bytes]:
        """Where a reader that has been told up to `after` begins, and what it is told first."""

    @abstractmethod
    def identifier(self, position: Position) -> str:
        """The position as the `id` of a message."""

    def snapshot(self, choice: Choice) -> bytes:
        """What a reader is told when it has caught up, beside the messages."""
        return b""
