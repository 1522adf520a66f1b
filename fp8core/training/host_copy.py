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

__all__ = ["HostCopy", "Named", "available_host_bytes", "bytes_of_copy"]

# Tensors by file stem, then by name.
Named = Mapping[str, Mapping[str, Tensor]]

_CGROUPS = Path("/sys/fs/cgroup")


class HostCopy:
    """Room for one copy of the same tensors again and again."""

    def __init__(self) -> None:
        # By stem, name and whether it is page-locked. The tensors are not asked: that would wake
        # the GPU of a machine whose run is on the CPU.
        self._held: dict[tuple[str, str, bool], Tensor] = {}

    def take(self, tensors: Named) -> Callable[[], dict[str, dict[str, Tensor]]]:
        """Copies ``tensors`` as they are at this point of their devices' queues.

        Returns what waits until the copy is complete and gives it; it is good until the next one is
        taken. Raises ``RuntimeError`` or ``MemoryError`` where there is no memory for it.
        """
        before, self._held = self._held, {}
        copies: dict[str, dict[str, Tensor]] = {}
        devices: set[torch.device] = set()
        for stem, named in tensors.items():
            copies[stem] = {}
            for name, tensor in named.items():
                there = tensor.detach()
                key = (stem, name, there.is_cuda)
                place = before.get(key)
                if place is None or (place.shape, place.dtype) != (there.shape, there.dtype):
                    place = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
                self._held[key] = copies[stem][name] = place.copy_(there, non_blocking=True)
                if there.is_cuda:
                    devices.add(there.device)
        events = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)

        def arrived() -> dict[str, dict[str, Tensor]]:
            for event in events:
                event.synchronize()
            return copies

        return arrived

    @property
    def held(self) -> bool:
        """Whether there has been a copy, whose memory the next one uses again."""
        return bool(self._held)


def bytes_of_copy(tensors: Named) -> int:
    """What a copy of ``tensors`` takes: page-locked blocks come in powers of two."""
    total = 0
    for named in tensors.values():
        for tensor in named.values():
            size = tensor.nbytes
            total += 1 << (size - 1).bit_length() if tensor.is_cuda and size else size
    return total


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
