"""Saving the present step of a run: one rank writes, all of them are in it.

What is saved is the same on all ranks but for their random numbers, which are gathered. That it is
the same is made sure of each time: ranks whose weights had parted would go on unnoticed, and the
checkpoint would be that of one of them.

A checkpoint that training goes on after is copied into the host's memory and written beside it, by
a thread; nothing is told of it before it is on disk as a whole. One is written at a time: the next
waits, and so does the end of a run, however it ends. The last checkpoint, and one for whose copy
the host lacks the memory, is written at once while training waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fp8core.telemetry import TelemetryWriter
from fp8core.training.checkpoint import CheckpointStore
from fp8core.training.digest import digest
from fp8core.training.host_copy import HostCopy, Named, available_host_bytes, bytes_of_copy
from fp8core.training.learner import Learner
from fp8core.training.position import Position
from fp8core.training.state import DataPlace, capture_state, capture_tensors
from fp8core.training.workdir import Workdir

if TYPE_CHECKING:
    from fp8core.training.adapter import Adapter

__all__ = ["Saver"]

# Of the memory that the host has left, as much as this may go into the copy.
_SHARE_OF_MEMORY = 0.75


class Saver:
    """Saves steps of one run. ``checkpoints``: None on ranks that do not write.

    ``beside``: whether checkpoints may be written beside training.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore | None,
        learner: Learner,
        adapter: Adapter | None,
        data: DataPlace,
        telemetry: TelemetryWriter,
        workdir: Workdir,
        *,
        beside: bool = True,
    ) -> None:
        self._checkpoints = checkpoints
        self._learner = learner
        self._world = learner.world
        self._adapter = adapter
        self._data = data
        self._telemetry = telemetry
        self._workdir = workdir
        self._copy = HostCopy() if beside else None
        self._writing: _Writing | None = None

    def among_best(self, metric: float) -> bool:
        """Whether a checkpoint of this metric would be kept as one of the best; all ranks agree.

        Waits for the one that is being written, and raises what became of it.
        """

        def ask() -> bool:
            self._wait()
            return self._store.among_best(metric)

        return bool(self._world.from_main(ask))

    def save(self, position: Position, kind: str) -> None:
        """Saves ``position``, then drops what is not to be kept; training may go on meanwhile.

        It is on disk at once where ``kind`` is not ``periodic``, else after ``finish``. The ranks
        that do not write wait for as long as the one that does. Raises what ``look`` raises of
        the checkpoint before; ``StorageFull`` on rank 0; ``TrainingError`` where the ranks'
        weights differ.
        """
        self._world.from_main(self._wait)
        tensors = capture_tensors(self._learner, self._adapter)
        if self._world.several:
            trained = {**tensors["adapter" if self._adapter else "model"], **tensors["engine"]}
            self._world.same("weights and FP8 state", digest(sorted(trained.items())))
        state = capture_state(position, self._data, self._adapter, self._world)
        self._world.from_main(lambda: self._begin(position, kind, tensors, state))

    @property
    def busy(self) -> bool:
        """Whether a thread of this rank is writing a checkpoint."""
        return self._writing is not None and not self._writing.ended

    def look(self) -> None:
        """Raises, on rank 0, what the writing of a checkpoint has failed with; waits for nothing.

        ``StorageFull`` where the disk has no room for it.
        """
        if self._writing is not None and self._writing.ended:
            self._wait()

    def finish(self) -> None:
        """Waits until all that was saved is on disk. Raises what ``look`` raises."""
        self._world.from_main(self._wait)

    def give_up(self) -> None:
        """The run has failed: what is being written is still finished, if it can be."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    @property
    def _store(self) -> CheckpointStore:
        assert self._checkpoints is not None
        return self._checkpoints

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()
            if writing.error is not None:
                raise writing.error

    def _begin(self, position: Position, kind: str, tensors: Named, state: dict[str, Any]) -> None:
        self._telemetry.phase("saving")
        step, metric = position.step, None
        if position.evaluated_step == step:
            metric = position.last_evaluation["eval/loss"]
        copied = self._copied(tensors) if kind == "periodic" else None
        if copied is None:
            self._write(step, kind, metric, tensors, state)
        else:
            arrived = copied
            self._writing = _Writing(lambda: self._write(step, kind, metric, arrived(), state))
        self._telemetry.phase("training")

    def _copied(self, tensors: Named) -> Callable[[], Named] | None:
        """A copy of ``tensors`` under way; None where there is to be none, or no memory for it."""
        if self._copy is None:
            return None
        needed, free = bytes_of_copy(tensors), available_host_bytes()
        why = f"the host has {free} left"
        if self._copy.held or free is None or needed <= _SHARE_OF_MEMORY * free:
            try:
                return self._copy.take(tensors)
            except (MemoryError, RuntimeError) as error:
                why = " ".join(str(error).split())[:300] or type(error).__name__
        self._copy = None
        self._telemetry.event(
            "saving_waits",
            f"a copy of the checkpoint takes {needed} bytes, and {why}: training waits while "
            "checkpoints are written",
            {"needed": needed, "free": free},
        )
        return None

    def _write(
        self,
        step: int,
        kind: str,
        metric: float | None,
        tensors: Named,
        state: dict[str, Any],
    ) -> None:
        store, telemetry = self._store, self._telemetry
        saved = store.save(
            step, tensors=tensors, state=state, metric=metric, extra=self._workdir.tokenizer
        )
        best = store.best()
        relative = self._workdir.relative(saved.path)
        telemetry.checkpoint(
            step,
            relative,
            kind=kind,
            best=best is not None and best.step == saved.step,
            metric=metric,
        )
        telemetry.artifact("checkpoint", relative, step)
        for removed in store.prune():
            gone: dict[str, Any] = {
                "step": removed.step,
                "path": self._workdir.relative(removed.path),
            }
            telemetry.event("checkpoint_removed", f"{gone['path']} is not kept", gone)


class _Writing:
    """A thread that writes one checkpoint, and what it failed with."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self.error: BaseException | None = None
        # As a daemon it keeps no process alive that is to end; who goes in order waits for it.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # raised where somebody acts on it
            self.error = error
