"""A frozen base in FP8 in Transformer Engine's kernels: what they read and compute, on a GPU.

Fused blocks and layer by layer, under delayed and current scaling.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8core import engines
from fp8core.conversion import convert
from fp8core.fusion import fused_inputs
from fp8core.numerics.float8_weight import Float8Weight, cast_weight
from fp8core.spec import Conversion
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from fp8core.training.frozen_base import store_base
from tests.fp8core.fusion.test_te_fusion_gpu import (
    DEVICE,
    LAYERS,
    _recipe,
    batch_of,
    loss_of,
    reasons,
    train,
)
from tests.fp8core.kernel_names import E4M3_BY_E4M3, E4M3_BY_E5M2, launched, launches

pytest.importorskip("peft")
from tests.fp8core.fusion.loras import ALL, planned, wrap  # it imports peft
from tests.fp8core.training.stored_bases_gpu import RECIPES, SCALINGS, made  # it imports peft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
