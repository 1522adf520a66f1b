"""Octrain's rows of `train_peers`: steps as the product's own loop takes them.

On a CPU `emulated` stands in for Transformer Engine: the ways are the same, the times mean nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peers.work import LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Step, Work
from torch import Tensor

from fp8core import engines
from fp8core.conversion import ConversionReport
from fp8core.data.batch import IGNORED, Batch
from fp8core.fusion.sequences import document_bounds
from fp8core.models import load
from fp8core.spec import JobSpec, parse_spec
from fp8core.training.assemble import Assembled, assemble
from fp8core.training.late_metrics import LateMetrics
from fp8core.training.learner import Learner
from fp8core.training.precision import dtype_of
from fp8core.training.ranks.silent import SilentTelemetry
from fp8core.training.step_graphs import StepGraphs, graph_refusal

__all__ = ["assembled", "batch_of", "octrain", "spec_of"]


def spec_of(work: Work, **changes: Any) -> dict[str, Any]:
    """The spec of a job that does ``work``; ``changes`` are to it, by its parts."""
    fp8_attention = changes.pop("fp8_attention", False)
    training = changes.pop("training", {})
    te = {
        "engine": "te",
        "fp8_format": "HYBRID",
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "fp8_dpa": fp8_attention,
    }
    return {
        "model": {"source": "config", "config": work.config()},
        "data": {"source": "builtin"},
        "recipe": _on(work.device, changes.pop("recipe", te)),
        # What FP8 does to small models is measured here, and not kept from them.
        "conversion": {"small_gemm": "off", **changes},
        "training": {
            "steps": work.tokens.shape[0],
            "batch_size": work.rows,
            "sequence_length": work.length,
            "optimizer": {
                "name": "adamw",
                "lr": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY,
            },
            "schedule": {"name": "constant", "warmup_steps": 0},
            "max_grad_norm": MAX_NORM,
            "precision": "throughput" if work.precision == "bf16" else "method",
            **training,
        },
        "resources": {"device": work.device.type},
    }


def _on(device: torch.device, recipe: dict[str, Any]) -> dict[str, Any]:
    """``recipe``, with `emulated` for te where that does not run."""
    if device.type == "cuda" or recipe["engine"] != "te":
        return recipe
    if recipe.get("fp8_dpa"):
        raise ValueError("attention in FP8 is Transformer Engine's alone, which needs a GPU")
    kept = {name: value for name, value in recipe.items() if name != "fp8_dpa"}
    return {**kept, "engine": "emulated"}


def assembled(work: Work, **changes: Any) -> Learner:
    """The product's own `Learner` for ``work``; ``changes`` are to its spec."""
    return _built(work, **changes)[1].learner


def _built(work: Work, **changes: Any) -> tuple[JobSpec, Assembled]:
    """The spec, and what `assemble` makes of it."""
    spec = parse_spec(spec_of(work, **changes))
    engine = engines.create(spec.recipe, work.device)
    loaded = load(spec, device=work.device, dtype=dtype_of(spec.training.precision.weights))
    made = assemble(spec, engine, loaded)
    _say_what_is_fused(made.conversion)
    made.learner.model.train()
    return spec, made


def batch_of(ids: Tensor, cuts: Sequence[int] = ()) -> Batch:
    """A `Batch` of ``ids`` [rows, length]; ``cuts``: where each row's further documents begin."""
    labels = ids.clone()
    documents = torch.zeros(ids.shape, dtype=torch.int32)
    for number, cut in enumerate(cuts, start=1):
        documents[:, cut:] = number
    bounds = document_bounds(documents)
    starts = bounds[:-1].long()
    labels.view(-1)[starts] = IGNORED
    owner = torch.bucketize(torch.arange(ids.numel()), bounds.long(), right=True) - 1
    positions = (torch.arange(ids.numel()) - starts[owner]).view(ids.shape)
    count = int((labels != IGNORED).sum())
    return Batch(ids, labels, None, positions, documents, ids.numel(), count, True, bounds)


class _Told(SilentTelemetry):
    """Prints the events of a run, and keeps nothing else."""

    def event(self, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        print(message)


class OctrainStep:
    """A step of the product's loop, and how many were replayed as CUDA graphs so far."""

    def __init__(self, step: Step, graphs: StepGraphs) -> None:
        self._step = step
        self._graphs = graphs

    def __call__(self, number: int) -> Tensor:
        return self._step(number)

    @property
    def replayed(self) -> int:
        return int(self._graphs.to_json()["replayed_steps"])


def octrain(work: Work, **changes: Any) -> OctrainStep:
    """The product's own loop body: `assemble`, `Learner`, figures a step late, CUDA graphs."""
    # Sixteen documents of unequal length in each row.
    squares = torch.linspace(0.0, 1.0, 17)[1:-1].square() * work.length
    cuts = squares.int().tolist() if changes.pop("packed", False) else []
    spec, made = _built(work, **changes)
    learner, late, told = made.learner, LateMetrics(late=work.device.type == "cuda"), _Told()
    refusal = graph_refusal(spec, learner, made.conversion)
    graphs = StepGraphs(refusal, learner, told, lambda: late.waited_for_host)

    def step(number: int) -> Tensor:
        batches = [batch_of(work.tokens[number - 1], cuts)]
        totals = learner.totals(number, batches)
        loss = graphs.gradients(
            number, batches, totals, with_health=False, before=lambda micro_batch: None
        )
        norm = learner.gradient_norm()
        figures = {"train/loss": loss, "train/grad_norm": norm}
        late.push(number, figures, {"train/lr": learner.learning_rate(number)})
        bad = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
        learner.update(number, norm, unless=bad)
        return loss.clone()  # a graph writes the next one over it

    return OctrainStep(step, graphs)


def _say_what_is_fused(conversion: ConversionReport) -> None:
    for row in conversion.others:
        print(f"{row.name}: {row.to or row.from_}{f' ({row.reason})' if row.reason else ''}")
    if conversion.fusion is None:
        print("fusion: not asked for")
        return
    rows = conversion.fusion.rows
    fused = sum(row.reason is None for row in rows)
    print(f"fusion: {fused} of {len(rows)} wholly")
    reasons = {f"{row.kind}: {row.reason}" for row in rows if row.reason is not None}
    attention = Counter(conversion.fusion.fp8_attention.values())
    for reason, count in attention.items():
        print(f"attention of {count} blocks: {reason or 'in FP8'}")
    for reason in sorted(reasons)[:8]:
        print(f"  not: {reason}")
