"""`backward_override` in fused blocks: FP8 forward and bf16 backward by the kernels, and training.

In block scaling, the one scaling on Hopper whose recipes have the field.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.conversion import convert
from fp8core.data.batch import Batch
from fp8core.engines.gemm_watch import GemmWatch
from fp8core.engines.te_availability import availability
from fp8core.engines.transformer_engine import TransformerEngine
from fp8core.fusion import fused_inputs
from fp8core.fusion.cross_entropy import plain_cross_entropy
from fp8core.spec import Conversion
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.fusion import test_bert_gpu, test_gpt2_gpu
from tests.fp8core.fusion.test_te_fusion_gpu import (
    DEVICE,
    FAMILIES,
    LAYERS,
    _recipe,
    batch_of,
    make,
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
    *((family, torch.bfloat16) for family in (*FAMILIES, "GPT2", "Bert")),
    # Of weights in fp32 the backward GEMMs read a copy; GPT-2's are transposed besides.
    *((family, torch.float32) for family in ("Llama", "GPT2", "Bert")),
]
FAR = 0.1
"""Rounding that differs before a cast to FP8 moves some elements by an FP8 step, as in
`test_gradient_parity_gpu`; a gradient of the wrong operand is tens of per cent away."""


def converted(
    value: str, family: str = "Llama", dtype: torch.dtype = torch.bfloat16, fuse: str = "auto"
) -> tuple[Any, TransformerEngine, Any]:
    recipe = _recipe({"scaling": "block", "backward_override": value})
    available = availability(recipe, DEVICE)
    if not available.ok:
        pytest.skip("; ".join(available.reasons))
    if family == "GPT2":
        model = test_gpt2_gpu.make(dtype)
    elif family == "Bert":
        model = test_bert_gpu.make(dtype, activation="gelu_new")
    else:
        model = make(family, dtype)
    engine = TransformerEngine(recipe, DEVICE)
    report = convert(model, engine, Conversion.model_validate({"fuse": fuse}))
    if fuse == "auto":
        assert reasons(report) == [None] * LAYERS
        assert report.fusion.whole
        assert "LayerNormMLP" not in report.fusion.classes.values()
    return model, engine, report


def batch_for(family: str, *, packed: bool) -> Batch:
    return replace(batch_of(5, packed=packed), causal=family != "Bert")


def loss_of(engine: TransformerEngine, model: Any, batch: Batch) -> Tensor:
    """Of each real token itself: any loss serves to compare gradients."""
    targets = batch.input_ids.masked_fill(batch.document_ids < 0, -100)
    inputs = fused_inputs(model, batch, torch.bfloat16)
    if batch.causal:
        inputs["use_cache"] = False
    with engine.training_context():
        logits = model(**inputs).logits
        return plain_cross_entropy(logits, targets) / (targets >= 0).sum()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_gradients_are_those_of_the_layers_one_by_one(
    family: str, dtype: torch.dtype, value: str
) -> None:
    found = []
    for fuse in ("none", "auto"):
        model, engine, _ = converted(value, family, dtype, fuse)
        loss = loss_of(engine, model, batch_for(family, packed=True))
        loss.backward()
        engine.after_backward()
        gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.item(), gradients))
    (expected, others), (own, gradients) = found
    assert own == pytest.approx(expected, rel=0.01)
    assert gradients.keys() == others.keys()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    apart = {n: float((g - others[n]).norm() / others[n].norm()) for n, g in gradients.items()}
    # A bias of k moves all scores of a token alike: what is left is rounding.
    apart = {name: far for name, far in apart.items() if not name.endswith("key.bias")}
    whole = torch.cat([gradient.flatten() for gradient in gradients.values()])
    along = torch.cat([gradient.flatten() for gradient in others.values()])
    total = float((whole - along).norm() / along.norm())
    print(family, dtype, value, total, max(apart.values()), max(apart, key=lambda n: apart[n]))
    assert total < FAR
    assert max(apart.values()) < 2 * FAR, apart


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("family", [*FAMILIES, "GPT2", "Bert"])
def test_kernels_are_in_fp8_forward_and_in_bf16_backward(family: str, value: str) -> None:
    model, engine, _ = converted(value, family)
    batch = batch_for(family, packed=False)
    for _ in range(2):
        loss_of(engine, model, batch).backward()
        engine.after_backward()
    losses: list[Tensor] = []
    forward = launched(lambda: losses.append(loss_of(engine, model, batch)))
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
        loss_of(engine, model, batch).backward()
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
    for name, fuse in (("plain", "none"), ("fused", "auto"), ("recomputed", "auto")):
        model, engine, _ = converted(value, dtype=torch.float32, fuse=fuse)
        if name == "recomputed":
            enable_gradient_checkpointing(model, engine)
        found[name] = train(engine, model, 8)
    print(value, found)
    for name in ("fused", "recomputed"):
        assert found[name][7] < found[name][1] * 0.98
        assert found[name] == pytest.approx(found["plain"], rel=0.05)


@pytest.mark.parametrize("value", VALUES)
def test_kept_casts_change_no_loss(value: str) -> None:
    """The second micro-batch multiplies with the casts of the first, forward and backward."""
    model, engine, _ = converted(value, dtype=torch.float32)
    batch = batch_of(1, packed=True)
    model.zero_grad()
    found = []
    for first in (None, True, False):
        with engine.training_context(first):
            inputs = {**fused_inputs(model, batch, torch.bfloat16), "use_cache": False}
            loss = plain_cross_entropy(model(**inputs).logits, batch.input_ids)
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
    loss_of(engine, model, batch_for(family, packed=False)).backward()
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
