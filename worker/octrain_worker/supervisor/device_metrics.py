"""The node's figures as metrics of one job: ``gpu/...`` of its own GPUs, ``host/...`` of the host.

The agent samples by the clock, a series is read by steps: so what was sampled since the last point
becomes one point, the mean, at the newest step that the trainer told. A step that takes minutes has
one point, and a trainer that has told no step has none.

Of several GPUs ``gpu/utilization`` is the mean, ``gpu/memory_bytes`` and ``gpu/power_watts`` the
sum and ``gpu/temperature_celsius`` the highest; each has its own as ``gpu/0/utilization`` and so
on, numbered as the job sees them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fp8core.stored_json import read_object

__all__ = ["DeviceMetrics"]

_JOINED: dict[str, Callable[[list[float]], float]] = {
    "utilization": fmean,
    "memory_bytes": sum,
    "power_watts": sum,
    "temperature_celsius": max,
}
# More is no figure of a machine.
_LARGEST = 1e300
_HOST = ("cpu_utilization", "memory_bytes")


class DeviceMetrics:
    """Follows the file that the node's agent writes, for an attempt on these GPUs."""

    def __init__(self, file: Path, gpu_indices: Sequence[int]) -> None:
        self._file = file
        self._indices = list(gpu_indices)
        self._seen: int | None = None
        self._step: int | None = None
        self._sums: dict[str, tuple[float, int]] = {}
        # What stands there now may be from before this attempt, or before the boot.
        self._changed()

    def due(self, step: int | None) -> dict[str, Any] | None:
        """A metrics record, when there is a new sample and a step it can stand at."""
        if not self._changed():
            return None
        sample = read_object(self._file)
        if sample is None:
            return None
        for name, value in _figures(sample, self._indices).items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1
        if step is None or step == self._step or not self._sums:
            return None
        values = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums.clear()
        self._step = step
        return {"type": "metrics", "time": time.time(), "step": step, "values": values}

    def _changed(self) -> bool:
        try:
            now = self._file.stat().st_mtime_ns
        except OSError:
            return False
        changed, self._seen = now != self._seen, now
        return changed


def _figures(sample: dict[str, Any], indices: list[int]) -> dict[str, float]:
    host = _numbers(sample.get("host"))
    figures = {f"host/{name}": host[name] for name in _HOST if name in host}
    listed = sample.get("gpus")
    found = [_numbers(gpu) for gpu in (listed if isinstance(listed, list) else [])]
    by_index = {gpu["index"]: gpu for gpu in found if "index" in gpu}
    gpus = [by_index.get(index, {}) for index in indices]
    for name, join in _JOINED.items():
        known = [gpu[name] for gpu in gpus if name in gpu]
        # The figure of all is known where each of them is.
        if known and len(known) == len(gpus):
            figures[f"gpu/{name}"] = float(join(known))
        if len(gpus) > 1:
            for number, gpu in enumerate(gpus):
                if name in gpu:
                    figures[f"gpu/{number}/{name}"] = gpu[name]
    return figures


def _numbers(value: Any) -> dict[str, float]:
    """The finite numbers of an object, by name; none of what is no object."""
    if not isinstance(value, dict):
        return {}
    return {
        name: float(number)
        for name, number in value.items()
        if type(number) in (int, float) and abs(number) < _LARGEST
    }
