"""LoRA beside fused blocks in the kernels of a GPU: numbers, GEMMs, state, on te and on amp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8core import engines
from fp8core.conversion import convert
from fp8core.data.attention import model_inputs
from fp8core.data.batch import Batch
from fp8core.fusion import fused_inputs
from fp8core.spec import Conversion
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.fusion.test_te_fusion_gpu import (
    DEVICE,
    LAYERS,
    _recipe,
    batch_of,
    loss_of,
    make,
    reasons,
    train,
)
from tests.fp8core.kernel_names import E4M3_BY_E4M3, E4M3_BY_E5M2, launched, launches
from tests.fp8core.training.conftest import job, series, train_here

__all__ = ["job", "series", "train_here"]  # fixtures

pytest.importorskip("peft")
from tests.fp8core.fusion.loras import ALL, planned, wrap  # it imports peft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"engine": "te", "scaling": "delayed", "amax_history_len": 4},
    "current": {"engine": "te", "scaling": "current"},
    "override": {
        "engine": "te",
        "amax_history_len": 4,
        "override_linear_precision": [False, False, True],
    },
    "high_precision": {
        "engine": "te",
        "scaling": "block",
        "backward_override": "high_precision",
    },
    "dequantized": {"engine": "te", "scaling": "block", "backward_override": "dequantized"},
    "amp": {"engine": "amp", "dtype": "bf16"},
}


def made(
    recipe: str, *, fuse: str = "auto", family: str = "Llama", keys: tuple[str, ...] = ALL
) -> tuple[Any, Any, Any]:
    """A converted model with adapters whose matrices B are no zeros, its engine, the report."""
    model, engine = make(family), engines.create(_recipe(RECIPES[recipe]), DEVICE)
    adapters = planned(model, keys)
    conversion = Conversion.model_validate({"fuse": fuse})
    report = convert(model, engine, conversion, adapters=adapters)
    wrap(model, adapters, size=0.06)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model, engine, report


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("recipe", ["delayed", "override", "amp"])
def test_blocks_with_adapters_are_fused_and_err_no_more_than_plain_ones(
    recipe: str, family: str
) -> None:
    """Beside fp32. Of te without FP8, as its proof is: FP8 changes more than the order of a sum."""
    batch = batch_of(0, packed=True)
    exact, _, _ = made("amp", fuse="none", family=family)
    found = {"exact": computed(exact.float(), batch, fused=False)}
    for name, fuse in (("plain", "none"), ("fused", "auto")):
        model, engine, report = made(recipe if name == "fused" else "amp", fuse=fuse, family=family)
        if name == "fused":
            assert reasons(report) == [None] * LAYERS
            assert report.fusion.whole
        with engine.evaluation_context():
            found[name] = computed(model, batch, fused=name == "fused")
    errors = {
        name: {
            key: float((values[key] - exact).norm() / exact.norm())
            for key, exact in found["exact"].items()
        }
        for name, values in found.items()
        if name != "exact"
    }
    assert len(errors["fused"]) == 1 + 2 * 7 * LAYERS
    worst = max(errors["fused"], key=lambda key: errors["fused"][key])
    print(recipe, family, worst, errors["fused"][worst], errors["plain"][worst])
    for key, error in errors["fused"].items():
        assert error < 1.5 * errors["plain"][key] + 0.01, key


def computed(model: Any, batch: Batch, *, fused: bool) -> dict[str, torch.Tensor]:
    """Logits at real tokens, and the gradients of their mean square by parameter."""
    dtype = torch.bfloat16 if torch.is_autocast_enabled(DEVICE.type) else torch.float32
    inputs = (
        fused_inputs(model, batch, dtype) if fused else model_inputs(batch, model.config, dtype)
    )
    logits = model(**{**inputs, "use_cache": False}).logits[batch.document_ids >= 0].float()
    logits.square().mean().backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_training_follows_the_unfused_one_with_and_without_recomputation(recipe: str) -> None:
    found = {}
    for name, fuse, checkpointing in (
        ("plain", "none", False),
        ("fused", "auto", False),
        ("recomputed", "auto", True),
    ):
        model, engine, report = made(recipe, fuse=fuse)
        if fuse == "auto":
            assert reasons(report) == [None] * LAYERS
        if checkpointing:
            enable_gradient_checkpointing(model, engine)
        found[name] = train(engine, model, 8)
    print(recipe, found)
    for name in ("fused", "recomputed"):
        assert found[name][7] < found[name][1] * 0.98
        assert found[name] == pytest.approx(found["plain"], rel=0.05)


def test_the_gemms_of_the_base_run_in_fp8_and_none_is_for_its_weights() -> None:
    model, engine, _ = made("delayed")
    train(engine, model, 2)
    batch = batch_of(5, packed=False)
    kernels = launched(lambda: loss_of(engine, model, batch, None).backward())
    engine.after_backward()
    forward, backward = launches(kernels, E4M3_BY_E4M3), launches(kernels, E4M3_BY_E5M2)
    # qkv, o, gate and up, down; nothing behind the first qkv needs a gradient.
    assert forward == 4 * LAYERS, kernels
    assert backward == 4 * LAYERS - 1, kernels


def test_state_and_health_are_by_the_gemms_of_the_base() -> None:
    model, engine, _ = made("delayed")
    train(engine, model, 2)
    state, weights = engine.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    engine.record_health(True)
    loss_of(engine, model, batch_of(5, packed=False), None).backward()
    engine.after_backward()
    figures = engine.health()
    engine.record_health(False)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        assert f"model.layers.1.{name}/forward/scale" in state
        for tensor in ("input", "weight", "grad_output"):
            amax = figures[f"fp8/model.layers.1.{name}/{tensor}/amax"]
            assert 0 < amax < float("inf"), (name, tensor)
    other, fresh, _ = made("delayed")
    results = []
    for loaded, its_engine in ((model, engine), (other, fresh)):
        loaded.load_state_dict(weights)
        its_engine.load_state_dict(state)
        results.append(loss_of(its_engine, loaded, batch_of(7, packed=True), None).item())
    assert results[0] == results[1]


@pytest.mark.parametrize("recipe", ["delayed", "override", "amp"])
def test_a_job_exports_what_an_unfused_one_does(
    recipe: str,
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
) -> None:
    parts: dict[str, Any] = {
        "model": {"config": {"attention_dropout": 0.0, "hidden_size": 64, "head_dim": 32}},
        "recipe": RECIPES[recipe],
        "training": {"steps": 4, "optimizer": {"lr": 0.01}},
        "adapter": {"rank": 8, "dropout": 0.1},
        "resources": {"device": "cuda"},
        "evaluation": {"every_steps": 0, "max_batches": 1},
        "checkpoint": {"every_steps": 0, "keep_best": 0},
    }
    works = {}
    for fuse in ("none", "auto"):
        _, works[fuse] = train_here(job(**parts, conversion={"fuse": fuse, "small_gemm": "off"}))
    rows = {r["name"]: r for r in json.loads((works["auto"] / "conversion.json").read_bytes())}
    assert rows["model.layers.1"]["to"] == "FusedLlamaDecoderLayer"
    assert rows["model.layers.1"]["reason"] is None
    losses = [series(work, "train/loss") for work in works.values()]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    plain, fused = (load_file(work / "model/model.safetensors") for work in works.values())
    assert fused.keys() == plain.keys()
    apart = {
        key: float((fused[key].float() - plain[key].float()).norm() / plain[key].float().norm())
        for key in plain
    }
    # Between bf16 and FP8, or two scalings of FP8, it is about 0.1: AdamW goes by signs at first.
    assert max(apart.values()) < 0.25, apart
    table = json.loads((works["auto"] / "precision.json").read_bytes())["rows"]["gemm_compute"]
    base = [k for k in table["layers"] if k["converted"] and not k["adapter"]]
    assert sum(k["layers"] for k in base) == (0 if recipe == "amp" else 14)
    assert all(gemm["gemm"] != "wgrad" for k in base for gemm in k["gemms"])
