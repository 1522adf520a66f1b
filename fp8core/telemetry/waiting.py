"""Records that wait to be written, in bounded memory: what is dropped first, and what never.

Beyond one bound the oldest records of FP8 health go, beyond a higher one the oldest other metrics
and progress too; what is kept is never dropped. Nothing here locks: the writer does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8core.telemetry.scalars import Scalars

__all__ = ["Dropped", "Item", "Waiting"]

# What a waiting record takes in memory, about; measured with names of 60 characters.
_RECORD_BYTES = 600
_VALUE_BYTES = 200


@dataclass(slots=True)
class Item:
    """A record that waits, as JSON, or as metrics that become JSON when they are written.

    ``order`` counts all records; ``scalars`` are still to be added to the metrics.
    """

    order: int
    body: str
    metrics: dict[str, Any] | None = None
    values: int = 0
    scalars: Scalars | None = None

    @property
    def size(self) -> int:
        return _RECORD_BYTES + _VALUE_BYTES * self.values


class Waiting:
    """Three queues by importance: FP8 health, ``figures`` (metrics and progress), and ``kept``.

    Sizes in bytes, about. ``in_hand``: the order of the record that is being written.
    """

    def __init__(self, health_bytes: int, most_bytes: int) -> None:
        self.health: deque[Item] = deque()
        self.figures: deque[Item] = deque()
        self.kept: deque[Item] = deque()
        self.order = 0
        self.in_hand: int | None = None
        self.dropped = Dropped()
        self._size = 0
        self._health_bytes = health_bytes
        self._most_bytes = max(most_bytes, health_bytes)

    @property
    def count(self) -> int:
        return len(self.health) + len(self.figures) + len(self.kept)

    @property
    def has_room(self) -> bool:
        """Whether so little waits that nothing was dropped for some time."""
        return self._size <= self._health_bytes // 2

    @property
    def oldest(self) -> int:
        """The order of the oldest record that is not in the file; beyond all when none waits."""
        waiting = [queue[0].order for queue in self._queues()]
        if self.in_hand is not None:
            waiting.append(self.in_hand)
        return min(waiting, default=self.order + 1)

    def add(self, queue: deque[Item], item: Item) -> None:
        """Puts ``item`` behind all in one of the queues; drops nothing."""
        self.order += 1
        item.order = self.order
        queue.append(item)
        self._size += item.size

    def make_room(self) -> None:
        while self._size > self._health_bytes and self.health:
            self._drop(self.health)
        while self._size > self._most_bytes and self.figures:
            self._drop(self.figures)

    def take(self) -> Item | None:
        """The oldest record, which is in hand then; None where none waits."""
        queues = self._queues()
        if not queues:
            return None
        item = min(queues, key=lambda queue: queue[0].order).popleft()
        self._size -= item.size
        self.in_hand = item.order
        return item

    def clear(self) -> None:
        for queue in (self.health, self.figures, self.kept):
            queue.clear()

    def _queues(self) -> list[deque[Item]]:
        return [queue for queue in (self.health, self.figures, self.kept) if queue]

    def _drop(self, queue: deque[Item]) -> None:
        item = queue.popleft()
        self._size -= item.size
        health = queue is self.health
        self.dropped.add(item.values, health=int(health), others=int(not health))


class Dropped:
    """What was dropped since the process began, and how much of it has been told."""

    def __init__(self) -> None:
        self.values = 0
        self._reported = 0
        self._told = 0
        self._health = 0
        self._others = 0

    def add(self, values: int, *, health: int = 0, others: int = 0) -> None:
        self.values += values
        self._health += health
        self._others += others

    @property
    def unreported_values(self) -> bool:
        return self.values != self._reported

    def report_values(self) -> float:
        self._reported = self.values
        return float(self.values)

    @property
    def untold(self) -> bool:
        return self.values != self._told or bool(self._others)

    def tell(self) -> tuple[str, dict[str, Any]]:
        data = {"health_records": self._health, "other_records": self._others}
        message = (
            f"{self._health} records of FP8 health and {self._others} of other metrics or "
            f"progress were dropped; {self.values} values since the process began"
        )
        self._health = self._others = 0
        self._told = self.values
        return message, {**data, "values": self.values}
