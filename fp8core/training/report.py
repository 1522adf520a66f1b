"""``report.json``: what a run did, in figures."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import tokenizers
import torch
import transformers

from fp8core.conversion import ConversionReport, count_rows
from fp8core.engines.protocol import Engine
from fp8core.spec.job import JobSpec
from fp8core.spec.outcomes import Reason
from fp8core.training.checkpoint import CheckpointStore
from fp8core.training.device import describe_device
from fp8core.training.memory import peak_bytes
from fp8core.training.parity import parity_report
from fp8core.training.position import Position
from fp8core.training.workdir import Workdir

__all__ = ["RunFacts", "make_report"]

FORMAT = 1


@dataclass(frozen=True)
class RunFacts:
    """What a report is made from."""

    spec: JobSpec
    position: Position
    reason: Reason
    engine: Engine
    model: torch.nn.Module
    conversion: ConversionReport
    fresh_weights: tuple[str, ...]
    checkpoints: CheckpointStore
    workdir: Workdir
    loading_seconds: float
    wall_seconds: float
    graphs: dict[str, Any]
    """What `StepGraphs` tells."""


def make_report(facts: RunFacts) -> dict[str, Any]:
    """The report as JSON values.

    ``losses`` are nats per target; ``gap`` is evaluation loss minus the mean training loss of the
    last ten steps. ``durations.training_seconds`` counts time inside steps over all runs of this
    workdir that the result builds on; ``wall_seconds`` is this process alone.
    """
    position, spec = facts.position, facts.spec
    mean = fmean(position.recent_losses) if position.recent_losses else None
    evaluated = position.last_evaluation.get("eval/loss")
    parameters = list(facts.model.parameters())
    seconds = position.seconds
    small, base = facts.conversion.small_gemms, facts.conversion.base_weights
    return {
        "format": FORMAT,
        "reason": facts.reason.value,
        "steps": position.step,
        "tokens": position.tokens,
        "losses": {
            "train_first": position.first_loss,
            "train_last": position.recent_losses[-1] if position.recent_losses else None,
            "train_mean_of_last_10": mean,
            "eval_last": evaluated,
            "eval_best": position.best_loss,
            "eval_best_step": position.best_step if position.best_loss is not None else None,
            "gap": evaluated - mean if evaluated is not None and mean is not None else None,
        },
        "evaluation": {"step": position.evaluated_step, "figures": position.last_evaluation},
        "speed": {
            "tokens_per_second": position.tokens / seconds if seconds else None,
            "step_seconds": seconds / position.step if position.step else None,
        },
        "memory": {"peak_bytes": peak_bytes(facts.engine.device)},
        "durations": {
            "loading_seconds": facts.loading_seconds,
            "training_seconds": seconds,
            "wall_seconds": facts.wall_seconds,
        },
        "model": {
            "path": facts.workdir.relative(facts.workdir.model) if spec.checkpoint.final else None,
            "class": type(facts.model).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "fresh_weights": list(facts.fresh_weights),
        },
        "adapter": None if spec.adapter is None else spec.adapter.model_dump(mode="json"),
        "conversion": {
            **count_rows(facts.conversion.rows),
            "small_gemm": None if small is None else small.to_json(),
            "base_weights": None if base is None else base.to_json(),
        },
        "divergence": {
            "on_divergence": spec.training.on_divergence.action,
            "skipped_steps": position.skipped,
            "fallback_bf16": position.fallback,
        },
        "parity": parity_report(spec, position),
        "cuda_graphs": facts.graphs,
        "recipe": spec.recipe.model_dump(mode="json"),
        "precision": spec.training.precision.model_dump(mode="json"),
        "device": describe_device(facts.engine.device),
        "ranks": spec.resources.ranks,
        "seed": spec.training.seed,
        "checkpoints": [
            {"step": saved.step, "path": facts.workdir.relative(saved.path), "metric": saved.metric}
            for saved in facts.checkpoints.saved()
        ],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
