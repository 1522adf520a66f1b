"""Whether the kernel killed something for want of memory while a trainer ran.

SIGKILL does not say who sent it. The kernel counts its out-of-memory kills per cgroup and for the
whole host: a count that grew between the trainer's start and its end is a strong hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["OomCounts"]

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class OomCounts:
    """The kernel's counters of out-of-memory kills; 0 where it keeps none."""

    host: int
    cgroup: int

    @classmethod
    def now(cls) -> OomCounts:
        return cls(host=_counter(Path("/proc/vmstat"), "oom_kill"), cgroup=_of_cgroup())

    def grew_since(self, earlier: OomCounts) -> bool:
        return self.host > earlier.host or self.cgroup > earlier.cgroup


def _of_cgroup() -> int:
    """The counter of the cgroup of this process, which its children share: version 2 keeps it in
    ``memory.events``, version 1 in the memory controller's ``memory.oom_control``."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0
    count = 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            count += _counter(_CGROUPS / path.lstrip("/") / "memory.events", "oom_kill")
        elif "memory" in controllers.split(","):
            folder = _CGROUPS / "memory" / path.lstrip("/")
            count += _counter(folder / "memory.oom_control", "oom_kill")
    return count


def _counter(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
