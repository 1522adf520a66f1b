"""Fused blocks whose GEMMs are chosen one by one: what stands around those GEMMs, on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core.data.attention import model_inputs
from fp8core.engines.protocol import NormDescription
from fp8core.engines.te_layers import ConvertedLayers
from fp8core.engines.te_override import JoinedOverrideLinear, OverrideLinear
from fp8core.engines.te_state import OwnDelayedState
from fp8core.fusion import fuse, fused_inputs, high_precision
from fp8core.fusion.plain import PlainParts, plain_norm
from fp8core.fusion.te_overridden import OverriddenParts
from tests.fp8core.fusion.berts import bert, encoder_batches
from tests.fp8core.fusion.families import FAMILIES, batches, make
from tests.fp8core.fusion.loras import ALL, GPT2, planned, wrap
from tests.fp8core.fusion.loras import outputs as adapted
from tests.fp8core.fusion.test_bert import assert_alike
from tests.fp8core.fusion.test_bert import outputs as encoded
from tests.fp8core.fusion.test_blocks import outputs

WGRAD_HIGH = (False, False, True)


class Chosen(PlainParts):
    """The GEMMs of `OverriddenParts`, told that FP8 is off, between what needs no GPU."""

    kinds = OverriddenParts.kinds
    mlp_in_one = OverriddenParts.mlp_in_one
    norm_linear = OverriddenParts.norm_linear
    norm_linear_and_norm = OverriddenParts.norm_linear_and_norm
    linears = OverriddenParts.linears
    linear = OverriddenParts.linear
    norm_mlp = OverriddenParts.norm_mlp
    norm_mlp_and_norm = OverriddenParts.norm_mlp_and_norm
    _dtype = torch.float32

    def __init__(self) -> None:
        self.made: dict[str, nn.Module] = {}

    def _make_gemms(
        self, name: str, weights: Callable[[], tuple[Tensor, Tensor | None]]
    ) -> nn.Module:
        layer = JoinedOverrideLinear(weights, WGRAD_HIGH, _no_quantizer, lambda: False)
        self.made[name] = layer
        return layer

    def _convert_linear(self, linear: nn.Linear, name: str) -> nn.Module:
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        assert weight is not None
        layer = OverrideLinear(weight, bias, WGRAD_HIGH, _no_quantizer, lambda: False)
        self.made[name] = layer
        return layer

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.made.pop(name, None)


def _no_quantizer(tensor: str) -> Any:
    raise AssertionError("nothing is cast where FP8 is off")


@pytest.fixture(autouse=True)
def _norms_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of norms need Triton."""
    monkeypatch.setattr(high_precision, "normalise", lambda x, norm, dtype: plain_norm(x, norm))
    monkeypatch.setattr(high_precision, "raise_unless_taken", lambda norm: None)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_blocks_compute_what_the_plain_ones_do(family: str) -> None:
    model = make(family)
    plain = {
        kind: outputs(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in batches().items()
    }
    keys = list(model.state_dict())
    parts = Chosen()
    fusion = fuse(model, parts, {})
    assert [row.reason for row in fusion.rows] == [None, None]
    assert fusion.whole
    assert list(model.state_dict()) == keys
    for kind, batch in batches().items():
        real = batch.document_ids >= 0
        found = outputs(model, fused_inputs(model, batch, torch.float32), real)
        assert_alike(found, plain[kind])


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_encoders_compute_what_the_plain_ones_do(activation: str) -> None:
    """No norm is before their q, k and v, and what the one behind attention gives is used twice."""
    model = bert(hidden_act=activation)
    plain = {
        kind: encoded(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in encoder_batches().items()
    }
    parts = Chosen()
    fusion = fuse(model, parts, {})
    assert [row.reason for row in fusion.rows] == [None, None]
    assert len(parts.made) == 2 * 4
    for kind, batch in encoder_batches().items():
        inputs = fused_inputs(model, batch, torch.float32)
        assert_alike(encoded(model, inputs, batch.document_ids >= 0), plain[kind])


@pytest.mark.parametrize(("family", "keys"), [("Llama", ALL), ("GPT2", GPT2)])
def test_adapters_stand_beside_chosen_gemms(family: str, keys: tuple[str, ...]) -> None:
    model = make(family)
    adapters = planned(model, keys)
    plain = wrap(copy.deepcopy(model), adapters)
    parts = Chosen()
    fusion = fuse(model, parts, {}, adapters=adapters)
    assert [row.reason for row in fusion.rows] == [None, None]
    assert len(parts.made) == 2 * 4
    wrapped = wrap(model, adapters)
    for batch in batches().values():
        logits, gradients = adapted(wrapped, batch, fused=True)
        expected, expected_gradients = adapted(plain, batch, fused=False)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        for name, gradient in gradients.items():
            other = expected_gradients[name]
            assert (gradient is None) == (other is None), name
            if gradient is not None and other is not None:
                assert (gradient - other).norm() <= 1e-4 * other.norm(), name


def test_every_gemm_has_a_name_and_is_told_of_by_its_layers() -> None:
    model = make("Llama")
    parts = Chosen()
    fusion = fuse(model, parts, {})
    gemms = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert set(parts.made) == {f"model.layers.{layer}.{gemm}" for layer in (0, 1) for gemm in gemms}
    assert set(fusion.classes.values()) == {"NormGemms", "OverrideLinear"}
    found = {name: layers for block in fusion.blocks for name, (_, layers) in block.modules.items()}
    up = tuple(f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up"))
    assert found["model.layers.1.mlp.gate_up_proj"] == (up,)
    joined = parts.made["model.layers.1.self_attn.qkv_proj"]
    assert joined.weight.shape == (64 + 32 + 32, 64)
    assert "in_features=64, out_features=128, bias=False, high_precision=wgrad" in repr(joined)
    for block in fusion.blocks:
        assert set(block.made) >= {f"{block.name}.{gemm}" for gemm in gemms}


@pytest.mark.parametrize("wrong", ["input_layernorm", "post_attention_layernorm"])
def test_of_a_half_that_could_not_be_built_nothing_is_left(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its norm is refused when some of its GEMMs are made, which would have histories."""
    model, parts = make("Llama"), Chosen()
    refused = [id(layer.get_submodule(wrong).weight) for layer in model.model.layers]

    def raise_unless_taken(norm: NormDescription) -> None:
        if id(norm.weight) in refused:
            raise ValueError("no kernel takes it")

    monkeypatch.setattr(high_precision, "raise_unless_taken", raise_unless_taken)
    fusion = fuse(model, parts, {})
    assert all("no kernel takes it" in str(row.reason) for row in fusion.rows)
    left = {"input_layernorm": ("gate_up_proj", "down_proj")}.get(wrong, ("qkv_proj", "o_proj"))
    half = "mlp" if wrong == "input_layernorm" else "self_attn"
    assert set(parts.made) == {
        f"model.layers.{layer}.{half}.{gemm}" for layer in (0, 1) for gemm in left
    }


def test_what_is_forgotten_keeps_no_state() -> None:
    """A half that was tried and refused leaves no histories, which a checkpoint would hold."""
    own = OwnDelayedState(4, 0, "max", None, None, torch.device("cpu"))
    layers = ConvertedLayers(own, overridden=True)
    for name in ("a.qkv_proj", "a.o_proj", "b.qkv_proj"):
        own.add(name)
        layers.linears[name] = nn.Identity()
    layers.forget(["a.qkv_proj", "a.o_proj", "a.core_attention"])
    assert list(layers.linears) == ["b.qkv_proj"]
    for direction in ("forward", "backward"):
        assert [name for name, _ in layers.states(direction)] == ["b.qkv_proj"]
