"""A job whose steps may be replayed, and batches to replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core import engines
from fp8core.data.batch import IGNORED, Batch
from fp8core.fusion.sequences import Sequences, document_bounds
from fp8core.spec import AmpRecipe
from fp8core.training.learner import Learner
from fp8core.training.outcome import RunResult
from fp8core.training.step_graphs import StepGraphs
from tests.fp8core.fusion.test_runs import FusingAmp
from tests.fp8core.training.tape import taped

__all__ = ["OFF", "RUN", "batch", "graphs", "learner"]

RUN: dict[str, Any] = {
    "recipe": {"engine": "amp", "dtype": "fp32"},
    "model": {"source": "config", "config": {"attention_dropout": 0.0}},
    "training": {"steps": 24},
    "evaluation": {"every_steps": 10, "max_batches": 1},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
    "telemetry": {"fp8_every_steps": 7},
}
OFF = {**RUN, "training": {**RUN["training"], "cuda_graphs": "off"}}


def batch(seed: int, documents: int, length: int = 64) -> Batch:
    """Two rows, each of ``documents``."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (2, length), generator=drawn)
    owners = torch.zeros(2, length, dtype=torch.int32)
    for row in range(2):
        for cut in torch.randperm(length - 1, generator=drawn)[: documents - 1] + 1:
            owners[row, cut:] += 1
    bounds = document_bounds(owners)
    labels = ids.clone()
    labels.view(-1)[bounds[:-1].long()] = IGNORED
    positions = Sequences(2, length, bounds).positions(ids.device)
    count = int((labels != IGNORED).sum())
    return Batch(ids, labels, None, positions, owners, ids.numel(), count, True, bounds)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepGraphs]:
    """Runs on a CPU may replay, with tapes, and count as limited by the host; one for each run."""
    made: list[StepGraphs] = []

    class Taped(StepGraphs):
        def __init__(self, refusal: str | None, learner: Learner, *others: Any) -> None:
            off = "training.cuda_graphs is off"
            kept = refusal if refusal == off else None
            super().__init__(kept, learner, others[0], lambda: 99, taped)
            made.append(self)

    monkeypatch.setattr("fp8core.training.loop.StepGraphs", Taped)
    fp32 = AmpRecipe(engine="amp", dtype="fp32")
    monkeypatch.setattr(engines, "create", lambda recipe, device: FusingAmp(fp32, device))
    return made


@pytest.fixture
def learner(
    graphs: list[StepGraphs],
    job: Callable[..., Path],
    train_here: Callable[..., tuple[RunResult, Path]],
) -> Learner:
    """Of fused blocks, a step old."""
    made: list[Learner] = []
    spec = job(**{**RUN, "training": {"steps": 1}, "evaluation": {"every_steps": 0}})
    train_here(spec, plant=lambda assembled: made.append(assembled.learner))
    return made[0]
