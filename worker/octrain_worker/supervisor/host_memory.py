"""Whether the kernel killed something for want of memory while a trainer ran.

SIGKILL does not say who sent it. The kernel counts its out-of-memory kills per cgroup and for the
whole host: a count that grew between the trainer's start and its end is a strong hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["OomCounts"]


@dataclass(frozen=True)
class OomCounts:
    """The kernel's counters of out-of-memory kills; 0 where it keeps none."""

    host: int
    cgroup: int

    @classmethod
    def now(cls) -> OomCounts:
        return cls(
            host=_counter(Path("/proc/vmstat"), "oom_kill"),
            cgroup=_counter(_cgroup_folder() / "memory.events", "oom_kill"),
        )

    def grew_since(self, earlier: OomCounts) -> bool:
        return self.host > earlier.host or self.cgroup > earlier.cgroup


def _cgroup_folder() -> Path:
    """The unified cgroup of this process, whose children share it."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return Path("/sys/fs/cgroup") / line[3:].lstrip("/")
    except OSError:
        pass
    return Path("/sys/fs/cgroup")


def _counter(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
