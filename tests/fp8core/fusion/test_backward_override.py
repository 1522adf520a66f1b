"""Fused blocks whose backward GEMMs are told their precision: their MLPs in steps, on a CPU."""

from __future__ import annotations

import pytest

from fp8core.fusion import fuse
from tests.fp8core.fusion.families import make
from tests.fp8core.fusion.parts_by_gemm import InSteps


def test_every_gemm_has_a_name_and_is_told_of_by_its_layers() -> None:
    model, parts = make("Llama"), InSteps()
    fusion = fuse(model, parts, {})
    gemms = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert parts.made == [f"model.layers.{layer}.{gemm}" for layer in (0, 1) for gemm in gemms]
    mlp = {name.rpartition(".")[2]: kind for name, kind in fusion.classes.items() if "mlp" in name}
    assert mlp == {
        "gate_proj": "LayerNormLinear", "up_proj": "LayerNormLinear", "down_proj": "Linear",
    }  # fmt: skip
    assert "LayerNormMLP" not in fusion.classes.values()


def test_an_mlp_is_never_asked_for_as_one() -> None:
    block = fuse(make("Llama"), InSteps(), {}).blocks[0]
    assert block.mlp is not None
    for ask in (InSteps().norm_mlp, InSteps().norm_mlp_and_norm):
        with pytest.raises(TypeError, match="LayerNormMLP has no backward_override"):
            ask(block.mlp.half)
