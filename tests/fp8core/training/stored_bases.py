"""Recipes, adapters and small models whose frozen base lies in FP8, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fp8core import engines
from fp8core.conversion import convert
from fp8core.models.adapter_targets import adapter_targets
from fp8core.spec import parse_spec
from fp8core.training.adapter import attach
from fp8core.training.frozen_base import store_base
from fp8core.training.outcome import RunResult

__all__ = [
    "CURRENT",
    "DELAYED",
    "OF_BASE",
    "STORED",
    "Job",
    "Series",
    "TrainHere",
    "of",
    "stored_model",
]

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
CURRENT = {"engine": "emulated", "scaling": "current"}
DELAYED = {"engine": "emulated", "amax_history_len": 4}
STORED = {"rank": 4, "base_weights": "fp8"}
OF_BASE = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)
"""Elements of the weights of all converted layers of the base."""


def of(folder: Path) -> dict[str, str]:
    return {"source": "path", "path": str(folder)}


def stored_model(folder: Path, recipe: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A model whose base lies in FP8, its report and its engine."""
    fields = {
        "model": of(folder),
        "data": {"source": "builtin"},
        "recipe": recipe,
        "adapter": STORED,
    }
    spec = parse_spec(fields)
    assert spec.adapter is not None
    model = AutoModelForCausalLM.from_pretrained(folder)
    targets = adapter_targets(model, spec.adapter)
    engine = engines.create(spec.recipe, torch.device("cpu"))
    report = convert(model, engine, spec.conversion)
    attach(spec, model, targets)
    store_base(report, engine)
    return model, report, engine
