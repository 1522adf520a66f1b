"""Blocks fused without FP8: engine amp in bf16, on a GPU; and its kernels beside exact formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8core import engines
from fp8core.conversion import convert, restore
from fp8core.data.attention import model_inputs
from fp8core.engines.amp import AmpEngine
from fp8core.engines.protocol import Engine, NormDescription
from fp8core.fusion import fused_inputs
from fp8core.fusion.cross_entropy import plain_cross_entropy
from fp8core.fusion.high_precision import HighPrecisionParts, PyTorchAttention
from fp8core.fusion.plain import PlainParts
from fp8core.fusion.sequences import Sequences
from fp8core.spec import AmpRecipe, Conversion, parse_spec
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.fusion.test_te_fusion_gpu import DEVICE, FAMILIES, LAYERS, batch_of, make
from tests.fp8core.training.conftest import job, series, train_here

__all__ = ["job", "series", "train_here"]  # fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def engine_for(dtype: str = "bf16") -> AmpEngine:
    engine = engines.create(AmpRecipe(engine="amp", dtype=dtype), DEVICE)
    assert isinstance(engine, AmpEngine)
    return engine


def fused(family: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, AmpEngine, Any]:
    model, engine = make(family, dtype), engine_for()
    report = convert(model, engine, Conversion())
    assert report.fusion is not None
    assert [row.reason for row in report.fusion.rows] == [None] * LAYERS
    assert report.fusion.whole
    return model, engine, report


def train(engine: Engine, model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        batch = batch_of(step % 2, packed=step % 2 == 0)
        with engine.training_context():
            logits = model(**{**fused_inputs(model, batch, torch.bfloat16), "use_cache": False})
            loss = plain_cross_entropy(logits.logits[:, :-1], batch.input_ids[:, 1:])
        (loss / batch.input_ids.numel()).backward()
        engine.after_backward()
        losses.append(loss.item() / batch.input_ids.numel())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_block_is_fused_and_agrees_with_the_plain_one(
    family: str, dtype: torch.dtype
) -> None:
    model = make(family, dtype)
    batches = [batch_of(0, packed=False), batch_of(0, packed=True)]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = [model(**model_inputs(b, model.config, torch.bfloat16)).logits for b in batches]
    model, engine, _ = fused(family, dtype)
    for batch, plain in zip(batches, expected, strict=True):
        with torch.no_grad(), engine.evaluation_context():
            logits = model(**fused_inputs(model, batch, torch.bfloat16)).logits
        real = batch.document_ids >= 0
        assert apart(logits[real], plain[real]) < 0.03


def test_training_follows_the_plain_one_with_and_without_recomputation() -> None:
    found = {}
    for name, fuse, checkpointing in (
        ("plain", "none", False),
        ("fused", "auto", False),
        ("recomputed", "auto", True),
    ):
        model, engine = make("Llama", torch.float32), engine_for()
        report = convert(model, engine, Conversion.model_validate({"fuse": fuse}))
        assert (report.fusion is not None) == (fuse == "auto")
        if checkpointing:
            enable_gradient_checkpointing(model, engine)
        found[name] = train(engine, model, 8)
    assert found["fused"][7] < found["fused"][1] * 0.98
    for name in ("fused", "recomputed"):
        assert found[name] == pytest.approx(found["plain"], rel=0.01)


def test_heads_of_odd_widths_are_fused_too() -> None:
    """Neither a power of two, so that they are turned without the kernel, nor all of one kind."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        attn_implementation="sdpa",
    )
    model = transformers.Qwen3ForCausalLM(config).to(DEVICE).train()
    report = convert(model, engine_for(), Conversion())
    assert report.fusion is not None
    assert [row.reason for row in report.fusion.rows] == [None] * LAYERS


def test_rows_say_that_layers_are_kept_and_what_they_are_part_of() -> None:
    model, _, report = fused("Llama")
    rows = {row.name: row for row in report.rows}
    gate = rows["model.layers.1.mlp.gate_proj"]
    assert (gate.to, gate.group) == ("NormMLP", "model.layers.1.mlp")
    assert gate.reason == "engine amp converts nothing"
    assert (rows["lm_head"].to, rows["model.norm"].group) == (None, None)
    assert report.converted == []
    assert report.converted_layers() == {}
    before = dict(model.named_parameters())
    restore(model, report)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert dict(model.named_parameters()).keys() == before.keys()


def test_a_layer_that_the_spec_keeps_is_not_fused() -> None:
    report = convert(make("Llama"), engine_for(), Conversion(skip=["*.0.*up_proj"]))
    assert report.fusion is not None
    first, second = report.fusion.rows
    assert "up_proj is kept: conversion.skip names it" in str(first.reason)
    assert second.reason is None


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes_are_not_fused_and_the_report_says_so(dtype: str) -> None:
    report = convert(make("Llama", torch.float32), engine_for(dtype), Conversion())
    assert report.fusion is None
    (row,) = report.others
    assert "in bfloat16 only, and this computes in float" in str(row.reason)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("packed", [False, True])
def test_pytorchs_attention_stands_in_for_transformer_engines(
    packed: bool, window: int | None
) -> None:
    _, _, report = fused("Llama")
    assert report.fusion is not None
    fused_attention = report.fusion.blocks[0].attention
    assert fused_attention is not None
    half = replace(fused_attention.half, window=window)
    torch.manual_seed(0)
    bounds = torch.tensor([0, 50, 64, 128], dtype=torch.int32, device=DEVICE) if packed else None
    sequences = Sequences(2, 64, bounds)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, 64, heads, 64, device=DEVICE).bfloat16().requires_grad_()

    tensors = draw(4), draw(2), draw(2)
    along = torch.randn(2, 64, 4 * 64, device=DEVICE)
    found = PyTorchAttention(half)(*tensors, sequences)
    gradients = torch.autograd.grad(found, tensors, along.bfloat16())
    exact = [part.detach().float().requires_grad_() for part in tensors]
    expected = PlainParts().attention(half)(*exact, sequences)
    wanted = torch.autograd.grad(expected, exact, along)
    for own, other in zip((found, *gradients), (expected, *wanted), strict=True):
        assert apart(own, other) < 0.02


# Jobs


def test_a_job_in_bf16_is_fused_and_its_tables_say_how(
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
) -> None:
    """Accumulation, recomputation, evaluation and packed documents, beside the plain job."""
    parts: dict[str, Any] = {
        "recipe": {"engine": "amp"},
        "model": {
            "source": "config",
            "config": {
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "attention_dropout": 0.0,
            },
        },
        "training": {"steps": 6, "gradient_accumulation": 2, "gradient_checkpointing": True},
        "resources": {"device": "cuda"},
    }
    _, plain = train_here(job(**parts, conversion={"fuse": "none"}))
    _, work = train_here(job(**parts))
    for name in ("train/loss", "eval/loss"):
        assert series(work, name) == pytest.approx(series(plain, name), rel=0.01), name
    rows = {row["name"]: row for row in json.loads((work / "conversion.json").read_bytes())}
    assert rows["model.layers.1"]["to"] == "FusedLlamaDecoderLayer"
    assert rows["model.layers.1.mlp.up_proj"]["to"] == "NormMLP"
    assert rows["loss"]["to"] == "FusedCrossEntropy"
    unfused = {row["name"]: row for row in json.loads((plain / "conversion.json").read_bytes())}
    assert "loss" not in unfused
    table = json.loads((work / "precision.json").read_bytes())["rows"]["gemm_compute"]["layers"]
    assert {entry["kind"] for entry in table} == {"NormLinear", "NormMLP", "Linear"}
    for entry in table:
        assert not entry["converted"]
        assert {gemm["gemm"] for gemm in entry["gemms"]} == {"fprop", "dgrad", "wgrad"}
        for gemm in entry["gemms"]:
            assert {operand["format"] for operand in gemm["operands"].values()} == {"bf16"}


def test_what_the_small_gemm_rule_keeps_is_fused_in_bf16() -> None:
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": "te"},
        }
    )
    if not (available := engines.availability(spec.recipe, DEVICE)).ok:
        pytest.skip("; ".join(available.reasons))
    model, engine = make("Llama"), engines.create(spec.recipe, DEVICE)
    slower = {name: "FP8 would be slower" for name, _ in model.named_modules() if name}
    report = convert(model, engine, Conversion(), small_gemms=slower)
    assert report.converted == []
    assert report.fusion is not None
    assert [row.reason for row in report.fusion.rows] == [None] * LAYERS
    assert report.fusion.classes["model.layers.0.mlp.up_proj"] == "NormMLP"
    enable_gradient_checkpointing(model, engine)
    plain = make("Llama")
    losses = [train(engine, model, 4), train(engine_for(), plain, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert engine.state_dict().keys() == {"updates/forward", "updates/backward"}


# The kernels


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(("width", "rows"), [(96, 1), (128, 5000), (1000, 77), (9000, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms(kind: Any, width: int, rows: int, dtype: torch.dtype) -> None:
    from fp8core.fusion.norm_kernel import normalised

    torch.manual_seed(0)
    weight = nn.Parameter(torch.rand(width, device=DEVICE) + 0.5)
    bias = nn.Parameter(torch.randn(width, device=DEVICE)) if kind == "layer_norm" else None
    parameters = [weight] if bias is None else [weight, bias]
    for zero_centred in (False, True):
        norm = NormDescription(kind, (width,), 1e-5, weight, bias, zero_centred)
        x = (torch.randn(rows, width, device=DEVICE) * 3 + 1).to(dtype).requires_grad_()
        above = torch.randn(rows, width, device=DEVICE).to(dtype)
        found = normalised(x, norm, dtype)
        gradients = torch.autograd.grad(found, [x, *parameters], above)

        exact = x.detach().double().requires_grad_()
        factor = weight.double() + float(zero_centred)
        if bias is None:
            expected = F.rms_norm(exact, (width,), factor, 1e-5)
        else:
            expected = F.layer_norm(exact, (width,), factor, bias.double(), 1e-5)
        wanted = torch.autograd.grad(expected, [exact, *parameters], above.double())
        bound = 2**-8 if dtype == torch.bfloat16 else 1e-5
        assert apart(found, expected) < bound
        assert found.dtype == gradients[0].dtype == dtype
        for own, other in zip(gradients, wanted, strict=True):
            assert apart(own, other) < bound


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize("width", [96, 5000])
def test_gated_activations(activation: Any, width: int) -> None:
    from fp8core.fusion.gated_kernel import gated

    torch.manual_seed(0)
    joined = (torch.randn(3, 50, 2 * width, device=DEVICE) * 3).bfloat16().requires_grad_()
    above = torch.randn(3, 50, width, device=DEVICE).bfloat16()
    found = gated(joined, activation)
    (gradient,) = torch.autograd.grad(found, joined, above)
    exact = joined.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    active = F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")
    (wanted,) = torch.autograd.grad(active * up, exact, above.double())
    assert apart(found, active * up) < 2**-8
    assert apart(gradient, wanted) < 2**-8


@pytest.mark.parametrize("classes", [10, 4096, 50257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy(classes: int, dtype: torch.dtype) -> None:
    from fp8core.fusion.cross_entropy_kernel import sum_of_cross_entropies

    torch.manual_seed(0)
    logits = (torch.randn(2, 33, classes, device=DEVICE) * 4).to(dtype)
    logits[0, 20, 3] = -torch.inf
    targets = torch.randint(4, classes, (2, 33), device=DEVICE)
    targets[0, :5] = -100
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(
        exact.view(-1, classes), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    (wanted,) = torch.autograd.grad(expected / 7, exact)
    leaf = logits.clone().requires_grad_()
    found = sum_of_cross_entropies(leaf * 1.0, targets, -100)
    (gradient,) = torch.autograd.grad(found / 7, leaf)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert apart(gradient, wanted) < (2**-8 if dtype == torch.bfloat16 else 1e-5)
    assert not gradient[0, :5].any()
    for value, target in ((torch.inf, 5), (torch.nan, 5), (0.0, classes), (0.0, -1)):
        odd, of = logits.clone(), targets.clone()
        odd[1, 2, 1], of[1, 2] = value, target
        assert sum_of_cross_entropies(odd, of, -100).isnan()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [128, 48])
def test_rotation_of_heads_alone(packed: bool, width: int) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 11, 33, 66], dtype=torch.int32, device=DEVICE) if packed else None
    sequences = Sequences(2, 33, bounds)
    half = 9 * torch.randn(33, width // 2, device=DEVICE)
    angles = torch.cat((half, half), dim=-1)
    heads = torch.randn(2, 33, 3, width, device=DEVICE).bfloat16().requires_grad_()
    above = torch.randn(2, 33, 3, width, device=DEVICE).bfloat16()
    found = HighPrecisionParts(torch.bfloat16).rotate(heads, angles, sequences)
    (gradient,) = torch.autograd.grad(found, heads, above)
    turns = angles.double()[sequences.positions(DEVICE)][:, :, None, :]
    exact = heads.detach().double().requires_grad_()
    first, second = exact.chunk(2, dim=-1)
    expected = exact * turns.cos() + torch.cat((-second, first), dim=-1) * turns.sin()
    (wanted,) = torch.autograd.grad(expected, exact, above.double())
    assert apart(found, expected) < 2**-8
    assert apart(gradient, wanted) < 2**-8
