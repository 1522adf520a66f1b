"""The batches of a run, one step's at a time, and where the data stands behind the last step done.

A run may be asked to stop while it waits for its data. The step that they were for is then not
taken, on any rank, and those of its batches that had come are not trained on: the place that is
saved is that behind the step before, whatever was read since.
"""

from __future__ import annotations

from typing import Any

from fp8core.data.batch import Batch
from fp8core.data.batches import TrainingBatches
from fp8core.data.prefetch import WaitInterrupted
from fp8core.training.stopping import StopRequest

__all__ = ["StepBatches"]


class StepBatches:
    """``each``: micro-batches of a step. ``ended``: the data has, and there is no further step."""

    def __init__(self, source: TrainingBatches, each: int, stop: StopRequest) -> None:
        self.ended = False
        self._source = source
        self._each = each
        self._stop = stop
        self._place = source.state_dict()

    def take(self) -> list[Batch]:
        """Those of the next step; fewer, or none, at the end of the data.

        None at all where this process was asked to stop, before or while it waited. Other ranks
        may have theirs: whether the step is taken has to be asked of all of them behind each call.
        Raises what the source raises.
        """
        batches: list[Batch] = []
        try:
            while not self._stop.requested and len(batches) < self._each:
                batch = next(self._source, None)
                if batch is None:
                    self.ended = True
                    break
                batches.append(batch)
        except WaitInterrupted:
            return []
        return [] if self._stop.requested else batches

    def done(self) -> None:
        """What was taken is trained on, or was the end of the data."""
        self._place = self._source.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last step that was done, as the source says it."""
        return self._place
