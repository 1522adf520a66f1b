"""Values read from the database and kept only while every change of them would be heard."""

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(eq=False)
class Reading(Generic[Value]):
    """One read on its way; what changes meanwhile makes it worthless to keep."""

    spoiled: bool = False
    _value: Value | None = None

    def keep(self, value: Value) -> None:
        """Remember what was read."""
        self._value = value


class Cache(Generic[Value]):
    """The newest `size` values by key.

    `is_current` says whether changes are heard; while they are not, nothing is kept or given.
    Whoever hears of a change calls `forget`. `seconds` bounds what a change that nobody tells of
    (an administrator's SQL) can cost.
    """

    def __init__(self, is_current: Callable[[], bool], *, seconds: float, size: int) -> None:
        self._is_current = is_current
        self._seconds = seconds
        self._size = size
        self._values: OrderedDict[str, tuple[float, Value]] = OrderedDict()
        self._readings: defaultdict[str, set[Reading[Value]]] = defaultdict(set)

    def get(self, key: str) -> Value | None:
        """The value, if it is certain."""
        found = self._values.get(key)
        if found is None or not self._is_current() or monotonic() > found[0]:
            return None
        return found[1]

    @contextlib.contextmanager
    def reading(self, key: str) -> Iterator[Reading[Value]]:
        """Around a read of the database: `keep` its result if no change is heard before the end."""
        reading: Reading[Value] = Reading(spoiled=not self._is_current())
        self._readings[key].add(reading)
        try:
            yield reading
            if reading._value is not None and not reading.spoiled:
                self._put(key, reading._value)
        finally:
            self._readings[key].discard(reading)
            if not self._readings[key]:
                del self._readings[key]

    def forget(self, key: str | None) -> None:
        """The value of this key, or of every key, has changed."""
        if key is None:
            self._values.clear()
            for readings in self._readings.values():
                for reading in readings:
                    reading.spoiled = True
            return
        self._values.pop(key, None)
        for reading in self._readings.get(key, ()):
            reading.spoiled = True

    def _put(self, key: str, value: Value) -> None:
        self._values[key] = (monotonic() + self._seconds, value)
        self._values.move_to_end(key)
        while len(self._values) > self._size:
            self._values.popitem(last=False)
