"""When a process that has ended is started again: at once first, then after growing pauses."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE = 0.5  # seconds
LONGEST_PAUSE = 30.0
STABLE_SECONDS = 60.0  # a process that ran so long is no longer blamed for how it ended before


@dataclass(frozen=True)
class Decision:
    """``pause``: it has just been found ended and is due in so many seconds. ``start``: now."""

    pause: float | None = None
    start: bool = False


class Restarts:
    """``started`` maps the names of processes to when they were started (monotonic seconds)."""

    def __init__(self, started: dict[str, float]) -> None:
        self._started = started
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}

    def look(self, name: str, running: bool, now: float) -> Decision:
        """What is to be done about a process at this look."""
        if running:
            if now - self._started.get(name, now) > STABLE_SECONDS:
                self._failures.pop(name, None)
            return Decision()
        if name not in self._due:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** self._failures.get(name, 0))
            self._due[name] = now + pause
            return Decision(pause=pause)
        if now < self._due[name]:
            return Decision()
        del self._due[name]
        self._failures[name] = self._failures.get(name, 0) + 1
        self._started[name] = now
        return Decision(start=True)
