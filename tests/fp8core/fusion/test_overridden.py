"""Fused blocks whose GEMMs are chosen one by one: what stands around those GEMMs, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8core.engines.protocol import NormDescription
from fp8core.engines.te_layers import ConvertedLayers
from fp8core.engines.te_state import OwnDelayedState
from fp8core.fusion import fuse, high_precision
from tests.fp8core.fusion.families import make
from tests.fp8core.fusion.parts_by_gemm import Chosen, norms_of_a_cpu

__all__ = ["norms_of_a_cpu"]  # a fixture


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
