"""A frozen base in FP8 in Transformer Engine's kernels: bytes, numbers, whole jobs, on a GPU.

Fused blocks and layer by layer, under delayed and current scaling.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fp8core import engines
from fp8core.conversion import convert
from fp8core.fusion import fused_inputs
from fp8core.numerics.float8_weight import Float8Weight, cast_weight
from fp8core.spec import Conversion
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from fp8core.training.assemble import Assembled
from fp8core.training.frozen_base import store_base
from fp8core.training.stopping import StopRequest
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
from tests.fp8core.training.plants import stop_in_step

__all__ = ["job", "series", "train_here"]  # fixtures

pytest.importorskip("peft")
from tests.fp8core.fusion.test_adapters import ALL, planned, wrap  # it imports peft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"engine": "te", "scaling": "delayed", "amax_history_len": 4},
    "current": {"engine": "te", "scaling": "current"},
    "power of 2": {"engine": "te", "scaling": "current", "use_power_2_scales": True},
}
SCALINGS = ["delayed", "current"]
WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
"""Weights that outweigh the activations of `batch_of`: 16 Mi elements a block and more."""


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


def elements(model: Any) -> int:
    """Of the weights of all layers in blocks, adapters apart."""
    return sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and ".layers." in name and "lora_" not in name
    )


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("recipe", ["delayed", "current", "power of 2"])
def test_a_cast_is_to_the_bit_what_transformer_engine_makes_of_the_weight(recipe: str) -> None:
    """Under current scaling: of the same amax, so the same codes and the same scale."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    power = recipe == "power of 2"
    quantizer = Float8CurrentScalingQuantizer(
        tex.DType.kFloat8E4M3, DEVICE, force_pow_2_scales=power
    )
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(512, 256, device=DEVICE, generator=generator).to(dtype)
        (stored,) = cast_weight([weight], power_of_two=power)
        theirs = quantizer(weight)
        assert torch.equal(stored.codes.view(torch.uint8), theirs._data), dtype
        assert stored.scale_inverse.item() == theirs._scale_inv.item()


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("recipe", SCALINGS)
@pytest.mark.parametrize("keys", [ALL, ("q_proj", "v_proj")], ids=["all", "qv"])
def test_memory_at_rest_and_at_the_peak(recipe: str, fuse: str, keys: tuple[str, ...]) -> None:
    """At rest a byte a weight is left; and at a step's peak the casts that waited are no more.

    At a time dgrad turns over the weights of one GEMM, or of both of an MLP in one module.
    """
    rest, peak, weights, largest, size = {}, {}, 0, 0, 0
    warm, engine, report = made(recipe, base="fp8", fuse=fuse, keys=keys)
    train(engine, warm, 1)  # workspaces of GEMMs, which stay
    del warm, engine, report
    for base in ("stored", "fp8"):
        before = allocated()
        model, engine, report = made(
            recipe, base=base, fuse=fuse, keys=keys, num_hidden_layers=6, **WIDE
        )
        weights = elements(model)
        if base != "fp8":
            size = model.model.layers[0].mlp.down_proj.weight.element_size()
        largest = 3 * WIDE["hidden_size"] * WIDE["intermediate_size"]
        rest[base] = allocated() - before
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        for step in range(3):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            loss_of(engine, model, batch_of(step, packed=False), None).backward()
            engine.after_backward()
            optimizer.step()
            optimizer.zero_grad()
        peak[base] = torch.cuda.max_memory_allocated() - before
        del model, engine, report, optimizer, trained  # the report holds the model
    print(recipe, fuse, keys, {k: v / weights for k, v in rest.items()}, end=" ")
    print({k: v / weights for k, v in peak.items()}, largest / weights)
    assert size > 1
    # What kernels keep for themselves, a few MiB, comes with the first model or with the second.
    assert rest["stored"] - rest["fp8"] == pytest.approx((size - 1) * weights, rel=0.1)
    # Of what waited in casts for the backward pass there is no more than one turned over.
    assert peak["fp8"] < peak["stored"] - size * weights + largest + 0.1 * weights


@pytest.mark.parametrize("fuse", ["auto", "none"])
def test_storing_takes_no_more_than_one_gemm_beside_what_was_there(
    fuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8core.numerics.float8_weight._ELEMENTS_AT_ONCE", 1 << 18)
    model, engine, report = made("delayed", base="bf16", fuse=fuse, num_hidden_layers=3, **WIDE)
    before, weights = allocated(), elements(model)
    torch.cuda.reset_peak_memory_stats()
    store_base(report, engine)
    grown = torch.cuda.max_memory_allocated() - before
    largest = (2 if fuse == "auto" else 1) * WIDE["hidden_size"] * WIDE["intermediate_size"]
    print(fuse, grown / weights, largest / weights)
    # And what is cast at a time, in fp32, a few times over.
    assert grown < largest + (1 << 18) * 4 * 6
    assert before - allocated() == pytest.approx(weights, rel=0.1)


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("keys", [ALL, ("q_proj", "v_proj")], ids=["all", "qv"])
def test_current_scaling_trains_as_beside_a_base_that_is_cast_each_time(
    fuse: str, keys: tuple[str, ...]
) -> None:
    """The very same FP8 values: what differs is noise of atomics, if anything."""
    found = {}
    for base in ("bf16", "fp8"):
        model, engine, _ = made("current", base=base, fuse=fuse, keys=keys)
        found[base] = train(engine, model, 6)
        found[f"{base}, accumulated"] = train(engine, model, 2, accumulation=2)
    print(fuse, keys, found)
    assert found["bf16"][5] < found["bf16"][1]
    assert found["fp8"] == pytest.approx(found["bf16"], rel=1e-3)
    assert found["fp8, accumulated"] == pytest.approx(found["bf16, accumulated"], rel=1e-3)


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("recipe", SCALINGS)
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_training_follows_that_of_a_bf16_base_recomputed_or_not(
    recipe: str, fuse: str, family: str
) -> None:
    """Qwen2 has biases beside its projections."""
    found = {}
    for name, base, checkpointing in (
        ("bf16", "bf16", False),
        ("fp8", "fp8", False),
        ("recomputed", "fp8", True),
    ):
        model, engine, _ = made(recipe, base=base, fuse=fuse, family=family)
        if checkpointing:
            enable_gradient_checkpointing(model, engine)
        found[name] = train(engine, model, 8)
    print(recipe, fuse, family, found)
    assert found["fp8"][7] < found["fp8"][1] * 0.98
    assert found["fp8"] == pytest.approx(found["bf16"], rel=0.05)
    assert found["recomputed"] == pytest.approx(found["fp8"], rel=0.01)


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("recipe", SCALINGS)
def test_gemms_read_the_stored_codes_and_leave_them_as_they_are(recipe: str, fuse: str) -> None:
    """Forward, and backward but where nothing wants a gradient."""
    model, engine, _ = made(recipe, base="fp8", fuse=fuse)
    stored = {n: p for n, p in model.named_parameters() if isinstance(p, Float8Weight)}
    assert len(stored) == 7 * LAYERS
    before = {name: p.codes.view(torch.uint8).clone() for name, p in stored.items()}
    train(engine, model, 2)
    batch = batch_of(5, packed=False)
    kernels = launched(lambda: loss_of(engine, model, batch, None).backward())
    engine.after_backward()
    gemms = 4 if fuse == "auto" else 7
    forward, backward = launches(kernels, E4M3_BY_E4M3), launches(kernels, E4M3_BY_E5M2)
    assert forward == gemms * LAYERS, kernels
    assert backward == gemms * LAYERS - (1 if fuse == "auto" else 3), kernels
    for name, parameter in stored.items():
        assert torch.equal(parameter.codes.view(torch.uint8), before[name]), name
        assert parameter.grad is None


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("recipe", SCALINGS)
def test_state_and_health_tell_of_the_one_cast(recipe: str, fuse: str) -> None:
    model, engine, _ = made(recipe, base="fp8", fuse=fuse)
    train(engine, model, 2)
    state = engine.state_dict()
    engine.record_health(True)
    loss_of(engine, model, batch_of(5, packed=False), None).backward()
    engine.after_backward()
    figures = engine.health()
    engine.record_health(False)
    down = model.get_submodule("model.layers.1.mlp.down_proj.base_layer").weight
    name = "model.layers.1.mlp.down_proj"
    for figure, value in down.cast.figures.items():
        assert figures[f"fp8/{name}/weight/{figure}"] == value
    assert 0 < figures[f"fp8/{name}/input/amax"] < math.inf
    assert 0 < figures[f"fp8/{name}/grad_output/amax"] < math.inf
    if recipe == "delayed":
        scales = state[f"{name}/forward/scale"]
        assert scales[1] == 1, "of a weight that is never cast"
        assert scales[0] != 1
        assert not state[f"{name}/forward/amax_history"][:, 1].any()
    other, fresh, _ = made(recipe, base="fp8", fuse=fuse)
    with torch.no_grad():
        for own, theirs in zip(other.parameters(), model.parameters(), strict=True):
            if own.requires_grad:
                own.copy_(theirs)
    fresh.load_state_dict(state)
    engine.load_state_dict(state)
    losses = [
        loss_of(its, loaded, batch_of(7, packed=True), None).item()
        for loaded, its in ((model, engine), (other, fresh))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("fuse", ["auto", "none"])
def test_high_precision_reads_the_values_of_the_codes(fuse: str) -> None:
    """As in evaluation: beside the same model with those values in bf16."""
    found = {}
    for base in ("fp8", "bf16"):
        model, engine, _ = made("delayed", base=base, fuse=fuse)
        if base == "fp8":
            values = {
                name: p.dequantize()
                for name, p in model.named_parameters()
                if isinstance(p, Float8Weight)
            }
        else:
            with torch.no_grad():
                for name, value in values.items():
                    model.get_parameter(name).copy_(value)
        model.eval()
        with torch.no_grad(), engine.evaluation_context():
            inputs = fused_inputs(model, batch_of(3, packed=True), torch.bfloat16)
            found[base] = model(**{**inputs, "use_cache": False}).logits.float()
    assert torch.equal(found["fp8"], found["bf16"])


def test_gpt2_with_weights_that_lie_the_other_way_round() -> None:
    import transformers

    config = transformers.GPT2Config(
        n_embd=256, n_layer=2, n_head=4, vocab_size=512, n_positions=512
    )
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    found = {}
    for base in ("bf16", "fp8"):
        torch.manual_seed(0)
        model: Any = transformers.GPT2LMHeadModel(config).to(DEVICE, torch.bfloat16).train()
        engine: Any = engines.create(_recipe(RECIPES["current"]), DEVICE)
        adapters = planned(model, ("c_attn", "c_proj", "c_fc"))
        report = convert(model, engine, Conversion(), adapters=adapters)
        wrap(model, adapters, size=0.06)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if base == "fp8":
            assert store_base(report, engine).gemms == 8
        found[base] = train(engine, model, 4)
    print(found, reasons(report))
    assert found["fp8"] == pytest.approx(found["bf16"], rel=1e-3)


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("recipe", SCALINGS)
def test_a_job_evaluates_resumes_exports_and_says_what_its_base_lies_in(
    recipe: str,
    fuse: str,
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
) -> None:
    parts: dict[str, Any] = {
        "model": {"config": {"attention_dropout": 0.0, "hidden_size": 64, "head_dim": 32}},
        "recipe": RECIPES[recipe],
        "training": {"steps": 6, "optimizer": {"lr": 0.01}, "gradient_accumulation": 2},
        "resources": {"device": "cuda"},
        "evaluation": {"every_steps": 2, "max_batches": 1},
        "checkpoint": {"every_steps": 0, "keep_best": 0},
        "telemetry": {"fp8_every_steps": 2},
        "conversion": {"fuse": fuse, "small_gemm": "off"},
    }
    lora = {"rank": 8, "dropout": 0.1}
    _, plain = train_here(job(**parts, adapter=lora))
    spec = job(**parts, adapter={**lora, "base_weights": "fp8"})
    _, whole = train_here(spec)
    stop = StopRequest()

    parted = tmp_path / "parted"
    train_here(spec, parted, plant=stop_in_step(3, stop), stop=stop)
    train_here(spec, parted)
    for name in ("train/loss", "eval/loss"):
        assert series(parted, name) == pytest.approx(series(whole, name), rel=1e-3), name
        assert series(whole, name) == pytest.approx(series(plain, name), rel=0.05), name
    table = json.loads((whole / "precision.json").read_bytes())["rows"]
    report = json.loads((whole / "report.json").read_bytes())
    stored = report["conversion"]["base_weights"]
    assert stored["gemms"] == (8 if fuse == "auto" else 14)
    assert table["weights"]["formats"]["fp8_e4m3"] == {
        "bytes": stored["weights"],
        "elements": stored["weights"],
    }
    base = [k for k in table["gemm_compute"]["layers"] if k["converted"] and not k["adapter"]]
    formats = {gemm["operands"]["weight"]["format"] for kind in base for gemm in kind["gemms"]}
    assert formats == {"fp8_e4m3"}
    one, other = (load_file(w / "model/model.safetensors") for w in (plain, whole))
    assert one.keys() == other.keys()
    apart = {
        key: float((other[key].float() - one[key].float()).norm() / one[key].float().norm())
        for key in one
    }
    assert max(apart.values()) < 0.25, apart
    # The base itself came from where it was loaded, and was not rounded.
    assert other["model.embed_tokens.weight"].equal(one["model.embed_tokens.weight"])
    assert other["model.layers.0.mlp.up_proj.weight"].unique().numel() > 1500


def test_layers_that_fall_back_compute_with_the_stored_values(
    job: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    held: list[Assembled] = []

    def faulty(assembled: Assembled) -> None:
        held.append(assembled)
        layer = assembled.learner.model.get_submodule("model.layers.0.mlp.down_proj.base_layer")

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            bad = type(module) is not nn.Linear and module.training
            return output * float("inf") if bad else None

        layer.register_forward_hook(hook)

    spec = job(
        model={"config": {"attention_dropout": 0.0}},
        recipe=RECIPES["delayed"],
        training={"steps": 3, "on_divergence": "fallback_bf16"},
        adapter={"rank": 4, "base_weights": "fp8"},
        resources={"device": "cuda"},
        evaluation={"every_steps": 0, "max_batches": 1},
        checkpoint={"every_steps": 0, "keep_best": 0},
        conversion={"fuse": "none", "small_gemm": "off"},
    )
    result, _ = train_here(spec, plant=faulty)
    assert result.step == 3
    layer = held[0].learner.model.get_submodule("model.layers.0.mlp.down_proj.base_layer")
    assert type(layer) is nn.Linear
    assert isinstance(layer.weight, Float8Weight)
