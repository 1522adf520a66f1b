"""Whether an attempt's GPUs are free again: its memory given back, none of its processes on them.

The driver gives a killed process's memory back a moment after the process is gone; who starts on
the GPU in between runs out of memory for no fault of its own. Asked through NVML, and only where
that is there: without it nothing is known and nothing waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["GpuMemory"]

logger = logging.getLogger(__name__)

# A driver's own use of a GPU moves by as much.
_SLACK_BYTES = 128 << 20
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Use:
    used: int
    pids: frozenset[int]


class GpuMemory:
    """Remembers, when made, how the GPUs of these indices are used before a trainer is on them."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._before = {index: use for index in indices if (use := _use_of(index)) is not None}

    def wait_until_free(self, seconds: float) -> str | None:
        """None as soon as all are as they were before; after ``seconds`` what is still held."""
        give_up_at = time.monotonic() + seconds
        while True:
            held = [text for index in self._before if (text := self._held(index)) is not None]
            if not held:
                return None
            if time.monotonic() >= give_up_at:
                return "; ".join(held)
            time.sleep(_POLL_SECONDS)

    def _held(self, index: int) -> str | None:
        before, now = self._before[index], _use_of(index)
        if now is None:
            return None
        strangers = sorted(now.pids - before.pids)
        grown = now.used - before.used
        if not strangers and grown <= _SLACK_BYTES:
            return None
        who = f", by processes {strangers}" if strangers else ""
        return f"GPU {index} holds {grown >> 20} MiB more than before the attempt{who}"


def _use_of(index: int) -> _Use | None:
    """None where NVML cannot say."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        used = int(pynvml.nvmlDeviceGetMemoryInfo(device).used)
        processes: list[Any] = []
        with contextlib.suppress(pynvml.NVMLError):
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        return _Use(used, frozenset(int(one.pid) for one in processes))
    except pynvml.NVMLError as error:
        logger.debug("GPU %d cannot be asked: %s", index, error)
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
