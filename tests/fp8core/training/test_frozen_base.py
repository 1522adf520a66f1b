"""A frozen base in FP8 beside LoRA: what is stored, and what is computed of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from fp8core import engines
from fp8core.conversion import convert
from fp8core.engines.emulated_layers import EmulatedLinear
from fp8core.fusion.parts import Kernel, MLPHalf, NamedLinear, NormedKernel
from fp8core.fusion.plain import PlainParts
from fp8core.models.adapter_targets import adapter_targets
from fp8core.numerics.casts import E4M3, measure_amax, quantize
from fp8core.numerics.current_scaling import current_scale
from fp8core.numerics.float8_weight import Float8Weight, joined_again
from fp8core.spec import AmpRecipe, Conversion, parse_spec
from fp8core.training.adapter import attach
from fp8core.training.assemble import Assembled
from fp8core.training.frozen_base import store_base
from tests.fp8core.fusion.families import batches
from tests.fp8core.fusion.loras import ALL, outputs, planned, wrap
from tests.fp8core.fusion.test_runs import FusingAmp
from tests.fp8core.training.stored_bases import (
    CURRENT,
    DELAYED,
    OF_BASE,
    STORED,
    Job,
    Series,
    TrainHere,
    of,
    stored_model,
)
from tests.fp8core.training.test_adapter import FAST, QUICK, base, logits

__all__ = ["base"]  # a fixture


@pytest.mark.parametrize("precision", ["method", "throughput"])
def test_current_scaling_computes_what_it_does_beside_weights_that_it_casts_each_time(
    job: Job, train_here: TrainHere, series: Series, base: Path, precision: str
) -> None:
    """To the bit: the values are the same, and so is all that is computed of them."""
    found, models = [], []
    for adapter in ({"rank": 4}, STORED):
        training = {**FAST, "precision": precision, "gradient_accumulation": 2}
        spec = job(**QUICK, model=of(base), recipe=CURRENT, adapter=adapter, training=training)
        _, workdir = train_here(spec)
        found.append((series(workdir, "train/loss"), series(workdir, "train/grad_norm")))
        models.append(load_file(workdir / "model/model.safetensors"))
    assert len(found[0][0]) == 4
    assert len(set(found[0][0].values())) == 4
    assert found[1] == found[0]
    # Merged into the base as it was loaded, and so the same too.
    assert models[1].keys() == models[0].keys()
    for key, value in models[0].items():
        torch.testing.assert_close(models[1][key], value, rtol=0, atol=0, msg=key)


def test_delayed_scaling_keeps_no_history_of_stored_weights(
    job: Job, train_here: TrainHere, base: Path
) -> None:
    held: list[Assembled] = []
    spec = job(**QUICK, model=of(base), recipe=DELAYED, adapter=STORED, training=FAST)
    train_here(spec, plant=held.append)
    state = held[0].learner.engine.state_dict()
    name = "model.layers.0.mlp.up_proj.forward"
    inputs, weights = state[f"{name}.amax_history"][:, 0], state[f"{name}.amax_history"][:, 1]
    assert inputs.any()
    assert not weights.any()
    assert state[f"{name}.scale"][1] == 1
    assert state[f"{name}.scale"][0] != 1


def test_the_engine_reads_the_codes_of_a_cast_with_that_amax(base: Path) -> None:
    model, _, engine = stored_model(base, CURRENT)
    original = load_file(base / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, EmulatedLinear):
            weight = original[f"{name.removesuffix('.base_layer')}.weight"]
            scale = current_scale(measure_amax(weight).value, E4M3.max)
            found = module.weight
            assert isinstance(found, Float8Weight)
            codes = quantize(weight, scale, E4M3)
            assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8)), name
            assert found.scale_inverse == scale.reciprocal()
    # The values stand in high precision, where evaluation reads them.
    with engine.evaluation_context():
        found_logits = logits(model)
    plain = AutoModelForCausalLM.from_pretrained(base)
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            stored = model.get_submodule(f"{name}.base_layer").weight
            module.weight = nn.Parameter(stored.dequantize())
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(plain)
    torch.testing.assert_close(found_logits, expected, rtol=0.05, atol=0.01)


def test_conv1d_layers_are_stored_as_their_gemms_read_them(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=272)
    torch.manual_seed(1)
    folder = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model, report, engine = stored_model(folder, CURRENT)
    assert report.base_weights.gemms == 8
    layer = model.get_submodule("transformer.h.0.attn.c_attn.base_layer")
    held = layer._parameters["weight"]
    assert isinstance(held, Float8Weight)
    assert held.shape == (32, 96)
    assert layer.weight.shape == (96, 32)
    assert layer.weight.codes.is_contiguous()
    original = load_file(folder / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    torch.testing.assert_close(held.dequantize(), original, rtol=0.07, atol=2e-4)
    ids = torch.arange(32).reshape(2, 16)
    with engine.training_context():
        loss = model(ids, labels=ids).loss
    loss.backward()
    engine.after_backward()
    assert loss.isfinite()


def test_weights_that_others_read_and_trained_ones_stay_as_they_are(base: Path) -> None:
    spec = parse_spec(
        {
            "model": of(base),
            "data": {"source": "builtin"},
            "recipe": CURRENT,
            "adapter": STORED,
            "conversion": {"output_head": True},
        }
    )
    assert spec.adapter is not None
    model = AutoModelForCausalLM.from_pretrained(base)
    targets = adapter_targets(model, spec.adapter)
    engine = engines.create(spec.recipe, torch.device("cpu"))
    report = convert(model, engine, spec.conversion)
    attach(spec, model, targets)
    model.get_submodule("model.layers.0.mlp.up_proj.base_layer").weight.requires_grad_(True)
    found = store_base(report, engine)
    assert found.gemms == 13
    assert {name: reason.split(",")[0] for name, reason in found.kept.items()} == {
        "model.layers.0.mlp.up_proj": "it is trained",
        "lm_head": "its weight is also that of another module",
    }
    assert type(model.lm_head.weight) is nn.Parameter


class Calling(nn.Module):
    """What a function computes, where a module is looked for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(*arguments)


class PartsThatAreModules(PlainParts):
    """As those of an engine on a GPU are."""

    def norm_linear(self, *of: Any) -> Kernel:
        return Calling(super().norm_linear(*of))

    def norm_linear_and_norm(self, *of: Any) -> NormedKernel:
        return Calling(super().norm_linear_and_norm(*of))

    def linear(self, linear: NamedLinear) -> Kernel:
        return Calling(super().linear(linear))

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        return Calling(super().norm_mlp(half))


class FusingStorer(FusingAmp):
    """Fuses on a CPU, and reads stored weights as their values."""

    stores_powers_of_two = False

    def block_parts(self) -> PlainParts:
        return PartsThatAreModules()

    def reads_stored_weights(self, module: nn.Module) -> bool:
        return True


@pytest.mark.parametrize("keys", [ALL, ("q_proj", "v_proj")], ids=["in steps", "MLP in one"])
def test_what_one_gemm_reads_has_one_scale(base: Path, keys: tuple[str, ...]) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    engine = FusingStorer(AmpRecipe(engine="amp", dtype="fp32"), torch.device("cpu"))
    adapters = planned(model, keys)
    report = convert(model, engine, Conversion(), adapters=adapters)
    assert report.fusion is not None
    assert report.fusion.whole
    wrap(model, adapters)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 2}
    found = store_base(report, engine)
    assert (found.gemms, found.elements, found.kept) == (8, OF_BASE, {})

    def stored(name: str) -> Float8Weight:
        (one,) = [
            p for n, p in model.named_parameters() if f"layers.1.{name}." in n and "lora" not in n
        ]
        assert isinstance(one, Float8Weight)
        return one

    together = [[f"self_attn.{n}_proj" for n in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]]
    for names in (*together, ["self_attn.o_proj"], ["mlp.down_proj"]):
        parts = [stored(name) for name in names]
        amaxes = [
            float(value.abs().max())
            for key, value in before.items()
            if "lora" not in key and any(f"layers.1.{name}." in key for name in names)
        ]
        assert {part.cast.amax for part in parts} == {max(amaxes)}
        whole = joined_again(parts)
        assert whole.codes.data_ptr() == parts[0].codes.data_ptr()
        assert whole.codes.untyped_storage().nbytes() == whole.numel()
    batch = batches()["packed"]
    fused, _ = outputs(model, batch, fused=True)
    report.fusion.remove_all()
    plain, _ = outputs(model, batch, fused=False)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
