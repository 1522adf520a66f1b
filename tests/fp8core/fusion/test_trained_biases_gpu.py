"""Biases and norms that are trained beside frozen weights, by every GEMM that te may give them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.conversion import convert, restore_layers
from fp8core.data.attention import model_inputs
from fp8core.data.batch import Batch
from fp8core.engines.te_availability import availability
from fp8core.engines.transformer_engine import TransformerEngine
from fp8core.fusion import fused_inputs
from fp8core.fusion.cross_entropy import plain_cross_entropy
from fp8core.spec import Conversion
from tests.fp8core.fusion.gpu_models import batch_for, distances, make
from tests.fp8core.fusion.test_te_fusion_gpu import DEVICE, LAYERS, _recipe, reasons

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIGH_PRECISION = [True, True, True]
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"amax_history_len": 4},
    "current": {"scaling": "current"},
    "block": {"scaling": "block"},
    "block, dequantized": {"scaling": "block", "backward_override": "dequantized"},
    "block, high_precision": {"scaling": "block", "backward_override": "high_precision"},
    "delayed, wgrad": {"amax_history_len": 4, "override_linear_precision": [False, False, True]},
    "current, wgrad": {"scaling": "current", "override_linear_precision": [False, False, True]},
    "delayed, all": {"amax_history_len": 4, "override_linear_precision": HIGH_PRECISION},
}
MODELS = [("GPT2", torch.float32), ("Bert", torch.bfloat16)]
FAR, FAR_IN_FP8 = (0.1, 0.2), (0.2, 0.5)
"""From bf16, of all gradients together and of each: FP8 has two or three bits behind the first. One
that counts twice is 1 away, and one that is forgotten is not there."""


def only_vectors_trained(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    return model


def converted(
    recipe: dict[str, Any], family: str, dtype: torch.dtype, fuse: str
) -> tuple[Any, TransformerEngine, Any]:
    parsed = _recipe(recipe)
    available = availability(parsed, DEVICE)
    if not available.ok:
        pytest.skip("; ".join(available.reasons))
    model, engine = only_vectors_trained(make(family, dtype)), TransformerEngine(parsed, DEVICE)
    report = convert(model, engine, Conversion.model_validate({"fuse": fuse}))
    if fuse == "auto" and recipe.get("override_linear_precision") != HIGH_PRECISION:
        assert reasons(report) == [None] * LAYERS
        assert report.fusion.whole
    return model, engine, report


def gradients(
    model: Any, inputs: dict[str, Any], batch: Batch, context: AbstractContextManager[Any]
) -> dict[str, Tensor]:
    """Of a loss that any token has of itself, by every parameter that is trained."""
    if batch.causal:
        inputs = {**inputs, "use_cache": False}
    with context:
        loss = plain_cross_entropy(model(**inputs).logits, batch.input_ids) / len(batch.input_ids)
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, parameter in trained.items() if parameter.grad is None]
    assert not missing, missing
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    found = {name: parameter.grad.float() for name, parameter in trained.items()}
    model.zero_grad()
    return found


def by_itself(family: str, dtype: torch.dtype, batch: Batch) -> dict[str, Tensor]:
    model = only_vectors_trained(make(family, dtype))
    inputs = model_inputs(batch, model.config, torch.bfloat16)
    return gradients(model, inputs, batch, torch.autocast("cuda", torch.bfloat16))


def assert_near(
    found: dict[str, Tensor], expected: dict[str, Tensor], far: tuple[float, float], label: str
) -> None:
    total, apart = distances(found, expected)
    print(label, round(total, 4), max((round(one, 4), name) for name, one in apart.items()))
    assert total < far[0], label
    assert max(apart.values()) < far[1], (label, apart)


@pytest.mark.parametrize("fuse", ["none", "auto"])
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_each_has_its_gradient(family: str, dtype: torch.dtype, recipe: str, fuse: str) -> None:
    batch = batch_for(family, packed=False)
    expected = by_itself(family, dtype, batch)
    model, engine, report = converted(RECIPES[recipe], family, dtype, fuse)
    inputs = fused_inputs(model, batch, torch.bfloat16)
    # Twice, for the scales of delayed scaling; the second micro-batch takes casts of the first.
    for first in (True, False, True, False):
        found = gradients(model, inputs, batch, engine.training_context(first))
        engine.after_backward()
    assert_near(found, expected, FAR_IN_FP8, "FP8")
    off = gradients(model, inputs, batch, engine.evaluation_context())
    assert_near(off, expected, FAR, "FP8 off")
    restore_layers(report, dict.fromkeys(report.converted_layers(), "for a test"))
    inputs = fused_inputs(model, batch, torch.bfloat16)
    fallen = gradients(model, inputs, batch, engine.training_context())
    assert_near(fallen, expected, FAR, "fallen back")
