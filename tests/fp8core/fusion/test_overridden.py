"""Fused blocks whose GEMMs are chosen one by one: what stands around those GEMMs, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core.data.attention import model_inputs
from fp8core.engines.te_layers import ConvertedLayers
from fp8core.engines.te_override import JoinedOverrideLinear, OverrideLinear
from fp8core.engines.te_state import OwnDelayedState
from fp8core.fusion import fuse, fused_inputs, high_precision
from fp8core.fusion.parts import NamedLinear
from fp8core.fusion.plain import PlainParts, plain_norm
from fp8core.fusion.te_overridden import OverriddenParts
from tests.fp8core.fusion.families import FAMILIES, batches, make
from tests.fp8core.fusion.test_blocks import outputs

WGRAD_HIGH = (False, False, True)


class Chosen(PlainParts):
    """The GEMMs of `OverriddenParts`, told that FP8 is off, between what needs no GPU."""

    kinds = OverriddenParts.kinds
    mlp_in_one = OverriddenParts.mlp_in_one
    norm_linear = OverriddenParts.norm_linear
    norm_linear_and_norm = OverriddenParts.norm_linear_and_norm
    linears = OverriddenParts.linears
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

    def linear(self, linear: NamedLinear) -> nn.Module:
        weight = nn.Parameter(linear.weight) if linear.weight is not linear.parameter else None
        layer = OverrideLinear(
            weight if weight is not None else linear.parameter,
            linear.bias,
            WGRAD_HIGH,
            _no_quantizer,
            lambda: False,
        )
        if weight is not None:  # as transformers' Conv1D has it
            layer.__dict__["_weights"] = lambda: (linear.weight, linear.bias)
        self.made[linear.name] = layer
        return layer


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
        logits, gradients = outputs(model, fused_inputs(model, batch, torch.float32), real)
        expected, expected_gradients = plain[kind]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        for name, gradient in gradients.items():
            apart = (gradient - expected_gradients[name]).norm()
            assert apart <= 1e-4 * expected_gradients[name].norm(), (kind, name)


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
