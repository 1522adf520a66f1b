"""When the gradients of a run's steps come from a CUDA graph, and when they do not.

A small model takes the host longer to enqueue than the GPU to compute. Then one launch of all of it
is faster; where the GPU is the limit it is not, and would only take memory of its own. Which of the
two a run is shows in it: whether the GPU had finished each step before the next was enqueued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8core.conversion import ConversionReport
from fp8core.conversion.small_gemm import drops_out
from fp8core.data.batch import Batch
from fp8core.engines.protocol import GraphedEngine
from fp8core.spec.job import JobSpec
from fp8core.spec.step_graphs import TIMES_A_STEP
from fp8core.spec.step_graphs import graph_refusal as of_spec
from fp8core.telemetry import TelemetryWriter
from fp8core.training.gradient_graph import Capture, GradientGraph, Shape, capturing, shape_of
from fp8core.training.learner import Learner, StepTotals

__all__ = ["StepGraphs", "graph_refusal"]

_IN_A_ROW = 8
"""Steps for each of which the device waited, before graphs are captured."""
_SEEN = 3
"""Batches of a shape before a graph of it is captured: what is made at a first use is made then."""
_MOST = 2
"""Shapes of which graphs are held: rows that are one sequence each, and rows of documents."""

_Kind = tuple[Shape, bool]
"""Of which shape, and whether FP8 health is recorded."""


def graph_refusal(spec: JobSpec, learner: Learner, conversion: ConversionReport) -> str | None:
    """Why no step of a run is replayed as a CUDA graph, or None."""
    reason = of_spec(spec)
    if reason is not None:
        return reason
    if learner.engine.device.type != "cuda":
        return "there are graphs on CUDA devices only"
    if not isinstance(learner.engine, GraphedEngine):
        return f"engine {learner.engine.name} does not count what is replayed"
    return _unfit(conversion)


def _unfit(conversion: ConversionReport) -> str | None:
    """Why the model may decide on the host what it computes, or was not measured; or None."""
    fusion = conversion.fusion
    if fusion is None or not fusion.whole:
        return "not all blocks are fused"
    if any(block.attention is None or block.mlp is None for block in fusion.blocks):
        return "not all blocks are fused in both halves"
    if not fusion.causal:
        return "attention looks ahead, and such steps were not measured as a graph"
    if drops_out(conversion.model):
        return "the model drops out activations"
    return None


class StepGraphs:
    """Computes the gradients of a run's steps: by graphs where they may and where that pays.

    ``waited_for_host``: for how many steps in a row the device has waited. A graph is of one shape
    of batches; those of other shapes are computed without. Steps whose FP8 health is recorded have
    graphs of their own, in which the kernels are that count it.
    """

    def __init__(
        self,
        refusal: str | None,
        learner: Learner,
        telemetry: TelemetryWriter,
        waited_for_host: Callable[[], int],
        capture: Capture | None = None,
    ) -> None:
        self.refusal = refusal
        self._learner = learner
        self._telemetry = telemetry
        self._waited_for_host = waited_for_host
        self._capture = capture or capturing()
        self._graphs: dict[_Kind, GradientGraph] = {}
        self._health: dict[_Kind, Any] = {}
        self._seen: Counter[_Kind] = Counter()
        self._host_is_limit = False
        self._first_step: int | None = None
        self._replays = 0

    def gradients(
        self,
        step: int,
        batches: Sequence[Batch],
        totals: StepTotals,
        *,
        with_health: bool,
        before: Callable[[int], None],
    ) -> Tensor:
        """`Learner.gradients`; ``before`` begins to record health where it is ``with_health``."""
        graph = self._graph_for(step, batches, with_health, before)
        if graph is None:
            return self._learner.gradients(step, batches, totals=totals, before=before)
        self._replays += 1
        return graph.gradients(batches[0], totals.targets)

    def to_json(self) -> dict[str, Any]:
        """For the report of the run: of this process's steps."""
        return {
            "from_step": self._first_step,
            "replayed_steps": self._replays,
            "reason": self.refusal,
        }

    def _graph_for(
        self,
        step: int,
        batches: Sequence[Batch],
        with_health: bool,
        before: Callable[[int], None],
    ) -> GradientGraph | None:
        """A graph that has been counted as computed once more."""
        if self.refusal is not None or len(batches) != 1:
            return None
        batch = batches[0]
        shape = shape_of(batch)
        if shape is None:
            return None
        engine = self._learner.engine
        assert isinstance(engine, GraphedEngine)
        with_health = with_health and engine.records_health
        kind = shape, with_health
        self._seen[kind] += 1
        # With graphs the device waits no more, so that this is found out once.
        self._host_is_limit = self._host_is_limit or self._waited_for_host() >= _IN_A_ROW
        graph = self._graphs.get(kind)
        if graph is not None and graph.has_room_for(batch):
            engine.replayed(self._health[kind])
            return graph
        shapes = {held for held, _ in self._graphs}
        full = shape not in shapes and len(shapes) == _MOST
        # Of what records health one step was enough; the kernels of all others are used by then.
        few = self._seen[kind] <= (1 if with_health else _SEEN)
        if not self._host_is_limit or few or full:
            return None
        return self._captured(step, batch, kind, before)

    def _captured(
        self, step: int, batch: Batch, kind: _Kind, before: Callable[[int], None]
    ) -> GradientGraph | None:
        engine = self._learner.engine
        assert isinstance(engine, GraphedEngine)
        if not _has_memory(engine.device):
            if not self._graphs:  # steps of other kinds keep theirs
                self._refuse(step, "the GPU has not twice the memory of a step")
            return None
        state = engine.state_dict()
        try:
            graph = GradientGraph(self._learner, batch, self._capture, before)
        # A model, a kernel or the driver may refuse in its own way; the run goes on without.
        except Exception as error:
            self._learner.drop_gradients()
            engine.load_state_dict(state)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._refuse(step, f"the capture failed: {text}")
            return None
        # One that had too little room has been held until now: PyTorch captures nothing more into
        # memory whose last graph is gone.
        self._graphs[kind] = graph
        self._health[kind] = engine.captured_health() if kind[1] else None
        if self._first_step is None:
            self._first_step = step
            self._telemetry.event(
                "step_graphed",
                f"step {step}: from here on forward and backward are one CUDA graph: the GPU had "
                f"waited for the host in {_IN_A_ROW} steps in a row",
                {"step": step},
            )
        return graph

    def _refuse(self, step: int, reason: str) -> None:
        self.refusal = reason
        # A capture that fails has random numbers drawn elsewhere than earlier graphs do.
        self._graphs.clear()
        self._health.clear()
        self._telemetry.event(
            "step_not_graphed",
            f"step {step}: steps stay as they are, without a CUDA graph: {reason}",
            {"step": step, "reason": reason},
        )


def _has_memory(device: torch.device) -> bool:
    """Whether a graph's memory fits beside that of steps without it, which there are too."""
    if device.type != "cuda":
        return True
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return free >= TIMES_A_STEP * torch.cuda.max_memory_allocated(device)
