"""`backward_override` in fused blocks: FP8 forward and bf16 backward by the kernels, and training.

In block scaling, the one scaling on Hopper whose recipes have the field.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.conversion import convert
from fp8core.engines.gemm_watch import GemmWatch
from fp8core.engines.te_availability import availability
from fp8core.engines.transformer_engine import TransformerEngine
from fp8core.fusion import fused_inputs
from fp8core.spec import Conversion
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.fusion.gpu_models import (
    EVERY_FAMILY,
    FAR,
    batch_for,
    distances,
    gradients_of,
    make,
    self_loss,
)
from tests.fp8core.fusion.test_te_fusion_gpu import (
    DEVICE,
    LAYERS,
    _recipe,
    batch_of,
    reasons,
    train,
)
from tests.fp8core.kernel_names import fp8_gemms, launched, other_gemms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VALUES = ("high_precision", "dequantized")
MODELS: list[tuple[str, torch.dtype]] = [
    *((family, torch.bfloat16) for family in EVERY_FAMILY),
    # Of weights in fp32 the backward GEMMs read a copy; GPT-2's are transposed besides.
    *((family, torch.float32) for family in ("Llama", "GPT2", "Bert")),
]


def converted(
    value: str, family: str = "Llama", dtype: torch.dtype = torch.bfloat16, fuse: str = "auto"
) -> tuple[Any, TransformerEngine, Any]:
    recipe = _recipe({"scaling": "block", "backward_override": value})
    available = availability(recipe, DEVICE)
    if not available.ok:
        pytest.skip("; ".join(available.reasons))
    model = make(family, dtype)
    engine = TransformerEngine(recipe, DEVICE)
    report = convert(model, engine, Conversion.model_validate({"fuse": fuse}))
    if fuse == "auto":
        assert reasons(report) == [None] * LAYERS
        assert report.fusion.whole
        assert "LayerNormMLP" not in report.fusion.classes.values()
    return model, engine, report


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_gradients_are_those_of_the_layers_one_by_one(
    family: str, dtype: torch.dtype, value: str
) -> None:
    batch = batch_for(family, packed=True)
    found = {}
    for fuse in ("none", "auto"):
        model, engine, _ = converted(value, family, dtype, fuse)
        found[fuse] = gradients_of(engine, model, batch)
    (expected, others), (own, gradients) = found["none"], found["auto"]
    assert own == pytest.approx(expected, rel=0.01)
    total, apart = distances(gradients, others)
    print(family, dtype, value, total, max((far, name) for name, far in apart.items()))
    assert total < FAR
    assert max(apart.values()) < 2 * FAR, apart


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_kernels_are_in_fp8_forward_and_in_bf16_backward(family: str, value: str) -> None:
    model, engine, _ = converted(value, family)
    batch = batch_for(family, packed=False)
    for _ in range(2):
        self_loss(engine, model, batch).backward()
        engine.after_backward()
    losses: list[Tensor] = []
    forward = launched(lambda: losses.append(self_loss(engine, model, batch)))
    backward = launched(losses[0].backward)
    engine.after_backward()
    # qkv, o, gate and up (or up), down; each has two GEMMs backward. BERT's head has a Linear more.
    assert len(fp8_gemms(forward)) == 4 * LAYERS + (family == "Bert"), forward
    assert not fp8_gemms(backward), backward
    assert len(other_gemms(backward)) >= 8 * LAYERS, backward


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("family", ["Llama", "Bert"])
def test_the_operands_of_all_three_gemms_of_each_layer(family: str, value: str) -> None:
    model, engine, report = converted(value, family)
    block = report.fusion.blocks[1]
    modules = {name: module for name, (module, _) in block.modules.items()}
    together = {name: layers for name, (_, layers) in block.modules.items()}
    batch = batch_for(family, packed=True)
    with GemmWatch(modules, batch.input_ids.shape, together) as watch:
        self_loss(engine, model, batch).backward()
        engine.after_backward()
    assert set(watch.seen) == {linear.name for linear in block.linears}
    for layer, seen in watch.seen.items():
        assert {gemm: set(formats) for gemm, formats in seen.items()} == {
            "fprop": {("fp8_e4m3", "fp8_e4m3")},
            "dgrad": {("bf16", "bf16")},
            "wgrad": {("bf16", "bf16")},
        }, layer


@pytest.mark.parametrize("value", VALUES)
def test_training_follows_the_plain_one_with_and_without_recomputation(value: str) -> None:
    found = {}
    for name, fuse in (
        ("plain", "none"),
        ("plain, recomputed", "none"),
        ("fused", "auto"),
        ("fused, recomputed", "auto"),
    ):
        model, engine, _ = converted(value, dtype=torch.float32, fuse=fuse)
        if "recomputed" in name:
            enable_gradient_checkpointing(model, engine)
        found[name] = train(engine, model, 8)
    print(value, found)
    for losses in found.values():
        assert losses[7] < losses[1] * 0.98
        assert losses == pytest.approx(found["plain"], rel=0.05)


@pytest.mark.parametrize("value", VALUES)
def test_kept_casts_change_no_loss(value: str) -> None:
    """The second micro-batch multiplies with the casts of the first, forward and backward."""
    model, engine, _ = converted(value, dtype=torch.float32)
    batch = batch_of(1, packed=True)
    found = []
    for first in (None, True, False):
        loss = self_loss(engine, model, batch, first)
        (gradient,) = torch.autograd.grad(loss, model.model.layers[0].mlp.up_proj.weight)
        engine.after_backward()
        found.append((loss.item(), gradient))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-3)
        assert float((gradient - found[0][1]).norm() / found[0][1].norm()) < 0.02


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("family", ["Llama", "Bert"])
def test_health_is_of_what_is_cast_and_of_nothing_else(family: str, value: str) -> None:
    model, engine, report = converted(value, family)
    engine.record_health(True)
    self_loss(engine, model, batch_for(family, packed=False)).backward()
    engine.after_backward()
    figures = engine.health()
    engine.record_health(False)
    gemms = list(report.fusion.blocks[1].modules)
    assert len(gemms) == 4
    for gemm in gemms:
        for tensor in ("input", "weight"):
            assert 0 < figures[f"fp8/{gemm}/{tensor}/amax"] < float("inf"), (gemm, tensor)
            assert 0.0 <= figures[f"fp8/{gemm}/{tensor}/underflow"] < 0.5, (gemm, tensor)
    assert not [name for name in figures if "/grad_output/" in name]


def test_evaluation_is_in_high_precision() -> None:
    model, engine, _ = converted("dequantized")
    batch = batch_of(5, packed=False)
    inputs = {**fused_inputs(model, batch, torch.bfloat16), "use_cache": False}
    with torch.no_grad(), engine.evaluation_context():
        names = launched(lambda: model(**inputs))
    assert not fp8_gemms(names), names
