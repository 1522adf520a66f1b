"""Recipes of te, and models beside adapters whose frozen base lies in FP8 or not, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core import engines
from fp8core.conversion import convert
from fp8core.spec import Conversion
from fp8core.training.frozen_base import store_base
from tests.fp8core.fusion.test_te_fusion_gpu import DEVICE, _recipe, make, reasons

pytest.importorskip("peft")
from tests.fp8core.fusion.loras import ALL, planned, wrap  # it imports peft

__all__ = ["RECIPES", "SCALINGS", "made"]

RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"engine": "te", "scaling": "delayed", "amax_history_len": 4},
    "current": {"engine": "te", "scaling": "current"},
    "power of 2": {"engine": "te", "scaling": "current", "use_power_2_scales": True},
}
SCALINGS = ["delayed", "current"]


def made(
    recipe: str,
    *,
    base: str,
    fuse: str = "auto",
    family: str = "Llama",
    keys: tuple[str, ...] = ALL,
    **changes: Any,
) -> tuple[Any, Any, Any]:
    """A converted model beside adapters, its base in ``base``; its engine, and the report."""
    model, engine = make(family, **changes), engines.create(_recipe(RECIPES[recipe]), DEVICE)
    if changes:  # wider: the same softmax of the same inputs
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(0.25)
    adapters = planned(model, keys)
    conversion = Conversion.model_validate({"fuse": fuse})
    report = convert(model, engine, conversion, adapters=adapters)
    if fuse == "auto":
        assert reasons(report) == [None] * model.config.num_hidden_layers
    wrap(model, adapters, size=0.06)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if base == "fp8":
        store_base(report, engine)
    return model, engine, report
