"""Saving the present step of a run: one rank writes, all of them are in it.

What is saved is the same on all ranks but for their random numbers, which are gathered. That it is
the same is made sure of each time: ranks whose weights had parted would go on unnoticed, and the
checkpoint would be that of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp8core.data.dataset import TrainingData
from fp8core.telemetry import TelemetryWriter
from fp8core.training.checkpoint import CheckpointStore
from fp8core.training.digest import digest
from fp8core.training.learner import Learner
from fp8core.training.position import Position
from fp8core.training.state import capture_state, capture_tensors
from fp8core.training.workdir import Workdir

if TYPE_CHECKING:
    from fp8core.training.adapter import Adapter

__all__ = ["Saver"]


class Saver:
    """Saves steps of one run. ``checkpoints``: None on ranks that do not write."""

    def __init__(
        self,
        checkpoints: CheckpointStore | None,
        learner: Learner,
        adapter: Adapter | None,
        data: TrainingData,
        telemetry: TelemetryWriter,
        workdir: Workdir,
    ) -> None:
        self._checkpoints = checkpoints
        self._learner = learner
        self._world = learner.world
        self._adapter = adapter
        self._data = data
        self._telemetry = telemetry
        self._workdir = workdir

    def among_best(self, metric: float) -> bool:
        """Whether a checkpoint of this metric would be kept as one of the best; all ranks agree."""
        return bool(self._world.from_main(lambda: self._store.among_best(metric)))

    def save(self, position: Position, kind: str) -> None:
        """Writes the checkpoint of ``position``, then drops what is not to be kept.

        The ranks that do not write wait until it is on disk. Raises ``StorageFull`` on rank 0,
        ``TrainingError`` where the ranks' weights differ.
        """
        tensors = capture_tensors(self._learner, self._adapter)
        if self._world.several:
            trained = {**tensors["adapter" if self._adapter else "model"], **tensors["engine"]}
            self._world.same("weights and FP8 state", digest(sorted(trained.items())))
        state = capture_state(position, self._data.train, self._adapter, self._world)
        self._world.from_main(lambda: self._write(position, kind, tensors, state))

    @property
    def _store(self) -> CheckpointStore:
        assert self._checkpoints is not None
        return self._checkpoints

    def _write(
        self,
        position: Position,
        kind: str,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: dict[str, Any],
    ) -> None:
        store, telemetry = self._store, self._telemetry
        telemetry.phase("saving")
        metric = None
        if position.evaluated_step == position.step:
            metric = position.last_evaluation["eval/loss"]
        saved = store.save(
            position.step,
            tensors=tensors,
            state=state,
            metric=metric,
            extra=self._workdir.tokenizer,
        )
        best = store.best()
        relative = self._workdir.relative(saved.path)
        telemetry.checkpoint(
            position.step,
            relative,
            kind=kind,
            best=best is not None and best.step == saved.step,
            metric=metric,
        )
        telemetry.artifact("checkpoint", relative, position.step)
        for removed in store.prune():
            gone: dict[str, Any] = {
                "step": removed.step,
                "path": self._workdir.relative(removed.path),
            }
            telemetry.event("checkpoint_removed", f"{gone['path']} is not kept", gone)
        telemetry.phase("training")
