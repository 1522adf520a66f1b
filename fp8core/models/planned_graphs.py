"""Whether steps of a job may be replayed as CUDA graphs, of which no memory is in the estimate.

What a graph holds follows from how it is captured (`fp8core.training.gradient_graph`): a pool that
is its own, in which forward and backward of one micro-batch allocate all that they do, so at least
as much as their activations and the loss take at the peak of a step; the gradients, which stay
there between two replays; and the tokens. Graphs of other shapes, and those that record FP8 health,
share the pool and have gradients of their own. None of it can be used by steps without a graph, for
which the allocator keeps its own. How far the pool is beyond what lives in it was measured with
other memory only, and is not derivable from here: no number is given.

None is needed either. A run captures no graph unless the GPU has twice what a step without takes,
and goes on without: the estimate is what a job must have, graphs or not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fp8core.models.planned_fusion import PlannedFusion
from fp8core.spec import JobSpec
from fp8core.spec.step_graphs import TIMES_A_STEP, graph_refusal

__all__ = ["PlannedGraphs", "planned_graphs"]


@dataclass(frozen=True)
class PlannedGraphs:
    """``refusal``: why no step would be replayed, or None; ``bytes_needed``: what the GPU must have
    for graphs, which are not in the estimate; ``says``: as text."""

    refusal: str | None
    bytes_needed: int | None
    says: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def planned_graphs(
    spec: JobSpec, fusion: PlannedFusion, total: int, *, drops_out: bool
) -> PlannedGraphs:
    """``total``: the memory of a step without graphs; ``drops_out``: whether the model drops out
    activations anywhere."""
    refusal = graph_refusal(spec)
    if refusal is None and spec.resources.device == "cpu":
        refusal = "there are graphs on CUDA devices only"
    if refusal is None:
        refusal = _unfit(fusion, drops_out)
    if refusal is not None:
        return PlannedGraphs(refusal, None, f"none: {refusal}")
    needed = TIMES_A_STEP * total
    says = (
        f"not counted; captured where the GPU has {needed / 2**30:.1f} GiB, {TIMES_A_STEP} times "
        "the total"
    )
    return PlannedGraphs(None, needed, says)


def _unfit(fusion: PlannedFusion, drops_out: bool) -> str | None:
    """As `fp8core.training.step_graphs` has it of the model of a run."""
    if not fusion.in_both_halves or not fusion.whole:
        return "not all blocks are fused in both halves"
    if not fusion.causal:
        return "attention looks ahead, and such steps were not measured as a graph"
    return "the model drops out activations" if drops_out else None
