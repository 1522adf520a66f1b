"""Fused blocks whose backward GEMMs are told their precision: their MLPs in steps, on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from fp8core.data.attention import model_inputs
from fp8core.engines.protocol import NormDescription
from fp8core.fusion import fuse, fused_inputs
from fp8core.fusion.parts import Kernel, NamedLinear, NormedKernel
from fp8core.fusion.plain import PlainParts
from fp8core.fusion.te_backward import BackwardParts
from tests.fp8core.fusion.berts import bert, encoder_batches
from tests.fp8core.fusion.families import FAMILIES, batches, make
from tests.fp8core.fusion.loras import ALL, GPT2, planned, wrap
from tests.fp8core.fusion.loras import outputs as adapted
from tests.fp8core.fusion.test_bert import assert_alike
from tests.fp8core.fusion.test_bert import outputs as encoded
from tests.fp8core.fusion.test_blocks import outputs


class InSteps(PlainParts):
    """What `BackwardParts` asks of a block, in PyTorch's operations; each GEMM by its name."""

    kinds = BackwardParts.kinds
    mlp_in_one = BackwardParts.mlp_in_one
    norm_mlp = BackwardParts.norm_mlp
    norm_mlp_and_norm = BackwardParts.norm_mlp_and_norm

    def __init__(self) -> None:
        self.made: list[str] = []

    def norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> Kernel:
        self.made.append(name)
        return super().norm_linear(norm, linears, name)

    def norm_linear_and_norm(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> NormedKernel:
        self.made.append(name)
        return super().norm_linear_and_norm(norm, linears, name)

    def linears(self, linears: Sequence[NamedLinear], name: str) -> Kernel:
        self.made.append(name)
        return super().linears(linears, name)

    def linear(self, linear: NamedLinear) -> Kernel:
        self.made.append(linear.name)
        return super().linear(linear)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_blocks_compute_what_the_plain_ones_do(family: str) -> None:
    model = make(family)
    plain = {
        kind: outputs(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in batches().items()
    }
    keys = list(model.state_dict())
    fusion = fuse(model, InSteps(), {})
    assert [row.reason for row in fusion.rows] == [None, None]
    assert fusion.whole
    assert list(model.state_dict()) == keys
    for kind, batch in batches().items():
        inputs = fused_inputs(model, batch, torch.float32)
        assert_alike(outputs(model, inputs, batch.document_ids >= 0), plain[kind])


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_encoders_compute_what_the_plain_ones_do(activation: str) -> None:
    """What the norm behind attention gives is the residual too."""
    model = bert(hidden_act=activation)
    plain = {
        kind: encoded(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in encoder_batches().items()
    }
    parts = InSteps()
    fusion = fuse(model, parts, {})
    assert [row.reason for row in fusion.rows] == [None, None]
    assert len(parts.made) == 2 * 4
    for kind, batch in encoder_batches().items():
        inputs = fused_inputs(model, batch, torch.float32)
        assert_alike(encoded(model, inputs, batch.document_ids >= 0), plain[kind])


@pytest.mark.parametrize(("family", "keys"), [("Llama", ALL), ("GPT2", GPT2)])
def test_adapters_stand_beside_them(family: str, keys: tuple[str, ...]) -> None:
    model = make(family)
    adapters = planned(model, keys)
    plain = wrap(copy.deepcopy(model), adapters)
    fusion = fuse(model, InSteps(), {}, adapters=adapters)
    assert [row.reason for row in fusion.rows] == [None, None]
    wrapped = wrap(model, adapters)
    for batch in batches().values():
        (logits, found), (other, expected) = (
            adapted(one, batch, fused=one is wrapped) for one in (wrapped, plain)
        )
        assert_alike((logits, trained(found)), (other, trained(expected)))


def trained(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


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
