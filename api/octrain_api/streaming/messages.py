"""Messages of live streams: what a reader chose, and the text/event-stream format.

A message is encoded once, however many readers take it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import translate
from functools import lru_cache
from re import Pattern, compile
from typing import Any, Generic, Protocol, TypeVar


class Ordered(Protocol):
    """What can be told to come before another of its kind."""

    def __lt__(self, other: Any, /) -> bool: ...


Position = TypeVar("Position", bound=Ordered)

RETRY = b"retry: 2000\n\n"


class Kind(StrEnum):
    """What a reader can choose."""

    STATUS = "status"
    EVENTS = "events"
    METRICS = "metrics"
    LOGS = "logs"


# Those that a job makes many of.
HEAVY = frozenset({Kind.METRICS, Kind.LOGS})


@dataclass(frozen=True)
class Choice:
    """What one reader wants to be told."""

    kinds: frozenset[Kind] = frozenset(Kind)
    # Patterns of metric names (`*` and `?`, which match `/` too); without any, every metric.
    metrics: tuple[str, ...] = ()

    def wants_metric(self, name: str) -> bool:
        """Whether a metric of this name was chosen."""
        return not self.metrics or _pattern(self.metrics).match(name) is not None


@lru_cache(maxsize=1024)
def _pattern(globs: tuple[str, ...]) -> Pattern[str]:
    return compile("|".join(translate(glob) for glob in globs))


def encode(event: str, data: Any, identifier: str | None = None) -> bytes:
    """One server-sent event; JSON has no line breaks, so its data is one line."""
    head = f"id: {identifier}\n" if identifier is not None else ""
    body = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"{head}event: {event}\ndata: {body}\n\n".encode()


class Message(Generic[Position]):
    """What one number of a stream tells."""

    __slots__ = ("_encoded", "kind", "position")

    def __init__(self, position: Position, kind: Kind, encoded: bytes) -> None:
        self.position = position
        self.kind = kind
        self._encoded = encoded

    @property
    def size(self) -> int:
        """About how many bytes it holds in memory."""
        return len(self._encoded)

    def encoded(self, choice: Choice) -> bytes:
        """Its text for a reader; empty when there is nothing in it that the reader chose."""
        return self._encoded if self.kind in choice.kinds else b""


class MetricsMessage(Message[Position]):
    """The points of one batch: encoded once for each choice of names."""

    __slots__ = ("_by_choice", "_encode", "_size")

    def __init__(
        self, position: Position, encode_names: Callable[[Choice], bytes], size: int
    ) -> None:
        super().__init__(position, Kind.METRICS, b"")
        self._encode = encode_names
        self._size = size
        self._by_choice: dict[tuple[str, ...], bytes] = {}

    @property
    def size(self) -> int:
        """About how many bytes it holds in memory."""
        return self._size

    def encoded(self, choice: Choice) -> bytes:
        """Its text for a reader, with the metrics that were chosen."""
        if Kind.METRICS not in choice.kinds:
            return b""
        found = self._by_choice.get(choice.metrics)
        if found is None:
            found = self._by_choice[choice.metrics] = self._encode(choice)
        return found


def joined(messages: Sequence[Message[Any]], choice: Choice) -> bytes:
    """The texts of these messages for a reader."""
    return b"".join([message.encoded(choice) for message in messages])
