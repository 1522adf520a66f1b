"""Figures of a step without waiting for the device.

Reading a number from a GPU waits until everything before it is computed. So the numbers of a step
are copied to pinned memory as part of the queue, and read one step later, when they have long
arrived. On a CPU there is nothing to wait for, and they are read at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.numerics.landing import Landing

__all__ = ["LateMetrics", "StepFigures"]


@dataclass(frozen=True)
class StepFigures:
    """What is known of one step: its number, and its figures by metric name."""

    step: int
    values: dict[str, float]


class LateMetrics:
    """Holds the figures of at most one step. ``late`` False: reads them at once, and waits."""

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._waiting: _Waiting | None = None
        self.waited_for_host = 0
        """Of how many steps in a row, up to the last, the device was done with all figures before
        the host had enqueued the gradients of the next: so long it has stood idle in between."""

    def push(
        self, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
    ) -> StepFigures | None:
        """Takes the figures of ``step``; returns those of the step before (not late: its own).

        ``tensors`` have one element each.
        """
        if not self._late:
            values = {name: float(tensor) for name, tensor in tensors.items()}
            return StepFigures(step, {**values, **numbers})
        if self._waiting is not None:
            arrived = self._waiting.landing.arrived
            self.waited_for_host = self.waited_for_host + 1 if arrived else 0
        settled = self.flush()
        stacked = torch.stack([tensor.detach().float().reshape(()) for tensor in tensors.values()])
        self._waiting = _Waiting(step, list(tensors), Landing([stacked]), dict(numbers))
        return settled

    def flush(self) -> StepFigures | None:
        """The figures still held, if any; waits for the device."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        (arrived,) = waiting.landing.wait()
        values = dict(zip(waiting.names, arrived.tolist(), strict=True))
        return StepFigures(waiting.step, {**values, **waiting.numbers})


@dataclass(frozen=True)
class _Waiting:
    step: int
    names: list[str]
    landing: Landing
    numbers: dict[str, float]
