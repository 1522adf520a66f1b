"""Times between marks in the order of what a device computes, and the peak of its memory."""

from __future__ import annotations

import platform
import time
from itertools import pairwise

import torch

__all__ = ["DeviceClock"]


class DeviceClock:
    """On a GPU by events of its own, which the host does not wait for; on a CPU by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def mark(self) -> None:
        if not self._on_gpu:
            self._seconds.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def milliseconds(self) -> list[float]:
        """From each mark to the next, when the device has computed all."""
        if not self._on_gpu:
            return [1000 * (later - earlier) for earlier, later in pairwise(self._seconds)]
        torch.cuda.synchronize()
        return [earlier.elapsed_time(later) for earlier, later in pairwise(self._events)]

    def forget_peak(self) -> None:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Of allocated memory; None on a CPU, where it is not counted."""
        return torch.cuda.max_memory_allocated() / 2**30 if self._on_gpu else None

    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self._on_gpu else platform.machine()
