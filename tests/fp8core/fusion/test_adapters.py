"""LoRA beside the layers of fused blocks: the numbers, the GEMMs, and which are computed."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from fp8core.engines.gemm_watch import GemmWatch
from fp8core.fusion import fuse, fused_inputs
from fp8core.fusion.plain import PlainParts
from fp8core.spec import LoraAdapter
from tests.fp8core.fusion.berts import bert, encoder_batches
from tests.fp8core.fusion.families import batches, make
from tests.fp8core.fusion.loras import ALL, BERT, GPT2, outputs, planned, reasons, wrap
from tests.fp8core.fusion.test_blocks import counted


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Llama", ALL),
        ("Llama", ("q_proj", "v_proj")),
        ("Llama", ("down_proj",)),
        ("Llama", ("up_proj",)),
        ("Llama, with biases", ALL),
        ("Qwen3", ALL),
        ("Gemma", ALL),
        ("GPT2", GPT2),
        ("GPT2", ("c_attn",)),
    ],
)
def test_adapters_beside_fused_layers_compute_what_they_do_beside_plain_ones(
    family: str, keys: tuple[str, ...], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws the same numbers in the same order, so that it can be compared too."""
    model = make(family)
    adapters = planned(model, keys, LoraAdapter(rank=4, alpha=6.0, dropout=dropout))
    plain = wrap(copy.deepcopy(model), adapters)
    fusion = fuse(model, PlainParts(), {}, adapters=adapters)
    assert reasons(fusion) == [None, None]
    wrapped = wrap(model, adapters)
    calls = counted(monkeypatch)
    for kind, batch in batches().items():
        expected, expected_gradients = outputs(plain, batch, fused=False)
        logits, gradients = outputs(wrapped, batch, fused=True)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        trained = {name for name, gradient in gradients.items() if gradient is not None}
        assert len(trained) == 2 * len(adapters.layers)
        assert all(".lora_" in name for name in trained)
        for name in trained:
            own, other = gradients[name], expected_gradients[name]
            assert own is not None
            assert other is not None
            assert (own - other).norm() <= 1e-4 * other.norm(), (kind, name)
            assert other.norm() > 0, name
    assert len(calls) == 2 * len(batches())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("keys", [BERT, ("query", "value")])
def test_adapters_beside_an_encoders_layers(keys: tuple[str, ...], dropout: float) -> None:
    """Its q, k and v have no norm before them; GELU is the model's; the norm is a residual too."""
    model = bert()
    adapters = planned(model, keys, LoraAdapter(rank=4, alpha=6.0, dropout=dropout))
    plain = wrap(copy.deepcopy(model), adapters)
    fusion = fuse(model, PlainParts(), {}, adapters=adapters)
    assert reasons(fusion) == [None, None]
    wrapped = wrap(model, adapters)
    for kind, batch in encoder_batches().items():
        expected, expected_gradients = outputs(plain, batch, fused=False)
        logits, gradients = outputs(wrapped, batch, fused=True)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        for name, own in gradients.items():
            other = expected_gradients[name]
            assert (own is None) == (other is None) == (".lora_" not in name), name
            if own is not None and other is not None:
                # What is added to all keys alike changes no softmax: 0, but for rounding.
                assert (own - other).norm() <= 1e-3 * other.norm() + 1e-4, (kind, name)


def test_an_mlp_without_adapters_stays_one_kernel() -> None:
    model = make("Llama")
    fusion = fuse(model, PlainParts(), {}, adapters=planned(model, ("q_proj", "v_proj")))
    kinds = fusion.classes
    assert kinds["model.layers.0.self_attn.k_proj"] == "NormLinear"
    assert kinds["model.layers.0.self_attn.o_proj"] == "Linear"
    assert {kinds[f"model.layers.0.mlp.{key}"] for key in ALL[4:]} == {"NormMLP"}
    other = make("Llama")
    kinds = fuse(other, PlainParts(), {}, adapters=planned(other, ("down_proj",))).classes
    assert kinds["model.layers.0.mlp.up_proj"] == "NormLinear"
    assert kinds["model.layers.0.mlp.down_proj"] == "Linear"


class Called(nn.Module):
    """A kernel as a module, as those of the engines are."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self._kernel = kernel

    def forward(self, x: Tensor) -> Any:
        return self._kernel(x)


class ModuleParts(PlainParts):
    def norm_linear_and_norm(self, *arguments: Any) -> Any:
        return Called(super().norm_linear_and_norm(*arguments))

    def linear(self, *arguments: Any) -> Any:
        return Called(super().linear(*arguments))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_frozen_base_has_no_gemm_for_its_weights(dropout: float) -> None:
    """And each matrix of an adapter has its own two or three, in the adapter's name."""
    # No layer, nor any that are one GEMM together, has as many features as there are tokens.
    model = make("Llama", num_key_value_heads=4)
    adapters = planned(model, ALL, LoraAdapter(rank=4, dropout=dropout))
    fusion = fuse(model, ModuleParts(), {}, adapters=adapters)
    wrapped = wrap(model, adapters)
    batch = batches()["padded"]
    found = {name: pair for block in fusion.blocks for name, pair in block.modules.items()}
    with GemmWatch(
        {name: module for name, (module, _) in found.items()},
        torch.Size((1, batch.input_ids.numel())),
        {name: gemms for name, (_, gemms) in found.items()},
    ) as watch:
        outputs(wrapped, batch, fused=True)
    matrices = {f"{n}.lora_{letter}.default" for n in adapters.layers for letter in "AB"}
    assert set(watch.seen) == adapters.layers | matrices
    for name in watch.seen:
        # The embedding is frozen: nothing behind the first three layers needs a gradient.
        first = "layers.0.self_attn" in name and "o_proj" not in name and "lora_B" not in name
        wanted = {"fprop"} if first else {"fprop", "dgrad"}
        if name in matrices:
            wanted |= {"wgrad"}
        counts = {gemm: formats.total() for gemm, formats in watch.seen[name].items()}
        assert counts == dict.fromkeys(wanted, 1), name


def test_what_is_merged_or_disabled_adds_nothing_twice() -> None:
    model = make("Llama")
    adapters = planned(model, ALL)
    fuse(model, PlainParts(), {}, adapters=adapters)
    batch = batches()["packed"]
    bare, _ = outputs(model, batch, fused=True)
    wrapped = wrap(model, adapters)
    whole, _ = outputs(wrapped, batch, fused=True)
    assert (whole - bare).norm() > 0.1 * bare.norm()
    with wrapped.disable_adapter(), torch.no_grad():
        inputs = {**fused_inputs(wrapped, batch, torch.float32), "use_cache": False}
        logits = wrapped(**inputs).logits[batch.document_ids >= 0]
    torch.testing.assert_close(logits, bare, rtol=1e-4, atol=1e-5)
    wrapped.merge_adapter()
    with torch.no_grad():
        logits = wrapped(**inputs).logits[batch.document_ids >= 0]
    torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-4)
    with wrapped.disable_adapter(), torch.no_grad():
        logits = wrapped(**inputs).logits[batch.document_ids >= 0]
    torch.testing.assert_close(logits, bare, rtol=1e-3, atol=1e-4)
    wrapped.merge_adapter()
    merged = wrapped.unload()
    with torch.no_grad():
        logits = merged(**inputs).logits[batch.document_ids >= 0]
    torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-4)


def test_rank_stabilised_scaling_is_the_modules_own() -> None:
    model = make("Llama")
    adapters = planned(model, ALL)
    plain = wrap(copy.deepcopy(model), adapters, use_rslora=True)
    fuse(model, PlainParts(), {}, adapters=adapters)
    wrapped = wrap(model, adapters, use_rslora=True)
    batch = batches()["padded"]
    expected, _ = outputs(plain, batch, fused=False)
    logits, _ = outputs(wrapped, batch, fused=True)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("active", [["default"], ["second"], ["default", "second"]])
def test_of_several_adapters_those_that_are_active_are_computed(active: list[str]) -> None:
    """Each with its own rank and scaling, and beside layers of its own."""
    model = make("Llama")
    adapters = planned(model, ALL)
    plain = copy.deepcopy(model)
    fuse(model, PlainParts(), {}, adapters=adapters)
    found = []
    for each, fused in ((plain, False), (model, True)):
        wrapped = wrap(each, adapters)
        second = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj", "up_proj"])
        wrapped.add_adapter("second", second)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if ".second." in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        wrapped.base_model.set_adapter(active)
        found.append(outputs(wrapped, batches()["packed"], fused=fused))
    (expected, expected_gradients), (logits, gradients) = found
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    trained = {name for name, gradient in gradients.items() if gradient is not None}
    count = {"default": 2 * 2 * 7, "second": 2 * 2 * 3}
    assert len(trained) == sum(count[key] for key in active)
    for name in trained:
        torch.testing.assert_close(
            gradients[name], expected_gradients[name], rtol=1e-3, atol=1e-3, msg=name
        )
