"""Tensors of a run copied into the host's memory, so that training may change its own at once.

On a CPU that is a plain copy. From a GPU the tensors go to page-locked memory as one more item of
the queue of its work: the next step's kernels wait behind it, the host does not. The memory of the
first copy is used again for all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fp8core.training.host_room import HostRoom, bytes_of_room

__all__ = ["HostCopy", "Named", "available_host_bytes", "bytes_of_copy"]

# Tensors by file stem, then by name.
Named = Mapping[str, Mapping[str, Tensor]]

_CGROUPS = Path("/sys/fs/cgroup")


class HostCopy:
    """Room for one copy of the same tensors again and again."""

    def __init__(self) -> None:
        self._room: HostRoom | None = None

    def take(self, tensors: Named) -> Callable[[], dict[str, dict[str, Tensor]]]:
        """Copies ``tensors`` as they are at this point of their devices' queues.

        Returns what waits until the copy is complete and gives it; it is good until the next one is
        taken. Raises ``RuntimeError`` or ``MemoryError`` where there is no memory for it.
        """
        if self._room is None or not self._room.fits(tensors):
            self._room = None  # before there is another one
            self._room = HostRoom(tensors)
        room = self._room
        devices: set[torch.device] = set()
        for stem, named in tensors.items():
            for name, tensor in named.items():
                room.places[stem][name].copy_(tensor.detach(), non_blocking=True)
                if tensor.is_cuda:
                    devices.add(tensor.device)
        room.writes.clear()
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            room.writes.append(event)

        def arrived() -> dict[str, dict[str, Tensor]]:
            for event in room.writes:
                event.synchronize()
            return {stem: dict(named) for stem, named in room.places.items()}

        return arrived

    @property
    def held(self) -> bool:
        """Whether there has been a copy, whose memory the next one uses again."""
        return self._room is not None


def bytes_of_copy(tensors: Named) -> int:
    """What a copy of ``tensors`` takes: their bytes, each rounded up to a cache line."""
    return bytes_of_room(tensors)


def available_host_bytes() -> int | None:
    """What this process can still allocate: of the machine's memory, and of its cgroup's limit.

    None where the kernel does not say. Files that are only cached count as free.
    """
    found = [_available_in_machine(), *_available_in_cgroups()]
    return min((count for count in found if count is not None), default=None)


def _available_in_machine() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _available_in_cgroups() -> list[int | None]:
    """Of the cgroup of this process and of all above it, which bound it too."""
    found = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            found.append(_left_in(root.joinpath(*parts[:depth]), *names))
    return found


def _left_in(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
    except (OSError, ValueError):
        return None  # no limit, or no such file here
    for line in _lines(folder / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == cached:
            used -= int(value)
    return max(0, most - used)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
