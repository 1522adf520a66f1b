"""What is not fused, and says why: models, blocks and halves that compute something else."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fp8core.data.attention import model_inputs
from fp8core.fusion import fuse, fused_inputs
from fp8core.fusion.parts import NamedLinear
from fp8core.fusion.plain import PlainParts
from tests.fp8core.fusion.families import batches, make


@pytest.mark.parametrize(
    ("changes", "fused_halves", "reason"),
    [
        ({"resid_pdrop": 0.1}, set(), "resid_dropout drops out"),
        ({"attn_pdrop": 0.1}, {"mlp"}, "attn_dropout drops out"),
        ({"activation_function": "gelu"}, {"attn"}, "not GELU in its tanh approximation"),
        ({"add_cross_attention": True}, set(), "not those of a GPT-2 block: crossattention"),
        ({"scale_attn_by_inverse_layer_idx": True}, {"attn", "mlp"}, None),
    ],
)
def test_what_of_gpt2_is_not_fused(
    changes: dict[str, Any], fused_halves: set[str], reason: str | None
) -> None:
    row = fuse(make("GPT2", **changes), PlainParts(), {}).rows[1]
    assert {half.rpartition(".")[2] for half in row.fused} == fused_halves
    assert (row.reason is None) if reason is None else (reason in str(row.reason))


def test_a_model_that_keeps_the_sequences_to_itself_is_not_fused() -> None:
    model = make("Llama")
    expected = model(**model_inputs(batches()["packed"], model.config), use_cache=False).logits
    own = model.model.forward
    model.model.forward = lambda *a, fused_sequences=None, **k: own(*a, **k)
    fusion = fuse(model, PlainParts(), {})
    assert not fusion.blocks
    assert fusion.layers == {}
    for row in fusion.rows:
        assert row.to is None
        assert "does not hand the sequences of its batches on" in str(row.reason)
    assert {type(layer).__name__ for layer in model.model.layers} == {"LlamaDecoderLayer"}
    inputs = fused_inputs(model, batches()["packed"], torch.float32)
    assert torch.equal(model(**inputs, use_cache=False).logits, expected)


def test_a_model_that_keeps_the_sequences_from_a_second_pass_is_not_fused() -> None:
    """Its blocks would have neither a mask nor sequences in that pass."""
    model = make("Llama")
    own = model.model.forward

    def twice(**options: Any) -> Any:
        first = own(**options).last_hidden_state
        again = {"position_ids": options.get("position_ids"), "use_cache": False}
        return own(inputs_embeds=first, attention_mask=options.get("attention_mask"), **again)

    model.model.forward = twice
    fusion = fuse(model, PlainParts(), {})
    assert not fusion.blocks
    reasons = {row.reason for row in fusion.rows}
    assert reasons == {"the model does not hand the sequences of its batches on to its blocks"}


def test_a_model_that_cannot_be_called_with_sequences_is_not_fused() -> None:
    model = make("Llama")
    own = model.forward
    model.forward = lambda input_ids, attention_mask=None, position_ids=None, use_cache=None: own(
        input_ids, attention_mask, position_ids, use_cache=use_cache
    )
    fusion = fuse(model, PlainParts(), {})
    assert not fusion.blocks
    assert "cannot be called with the sequences of its batches: TypeError" in str(
        fusion.rows[0].reason
    )
    assert model.training


def broken_rope(model: Any) -> None:
    own = model.model.rotary_emb.forward

    def scaled(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = own(x, position_ids)
        return cosine * 1.1, sine * 1.1

    model.model.rotary_emb.forward = scaled


def other_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()


def subclassed_linear(model: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    for layer in model.model.layers:
        layer.self_attn.v_proj.__class__ = Doubled


def extra_norm(model: Any) -> None:
    for layer in model.model.layers:
        layer.post_feedforward_layernorm = nn.Identity()


def attention_of_its_own(model: Any) -> None:
    """Looks like Llama, and scales what it attends to."""
    for layer in model.model.layers:
        own = layer.self_attn.forward
        layer.self_attn.forward = lambda *a, own=own, **k: (own(*a, **k)[0] * 1.01, None)


@pytest.mark.parametrize(
    ("change", "fused_halves", "reason"),
    [
        (broken_rope, {"mlp"}, "not cos and sin of position times frequency"),
        (other_activation, {"self_attn"}, "an activation that is neither SiLU nor GELU"),
        (subclassed_linear, {"mlp"}, "v_proj is a Doubled, not a plain Linear"),
        (extra_norm, set(), "its parts are not those of a Llama block: post_feedforward_layernorm"),
        (attention_of_its_own, {"mlp"}, "the output of its fused form differs by"),
    ],
)
def test_what_computes_something_else_is_refused(
    change: Any, fused_halves: set[str], reason: str
) -> None:
    model = make("Llama")
    change(model)
    fusion = fuse(model, PlainParts(), {})
    for row in fusion.rows:
        assert {half.rpartition(".")[2] for half in row.fused} == fused_halves
        assert row.reason is not None
        assert reason in row.reason


class ByAddress(PlainParts):
    """Takes a weight's address and shape, and not its strides."""

    def norm_linear(self, norm: Any, linears: Any, name: str) -> Any:
        return super().norm_linear(norm, [_in_its_memory(linear) for linear in linears], name)

    def norm_mlp(self, half: Any) -> Any:
        return super().norm_mlp(dataclasses.replace(half, down=_in_its_memory(half.down)))


def _in_its_memory(linear: NamedLinear) -> Any:
    weight = linear.weight
    assert not weight.is_contiguous()
    return types.SimpleNamespace(
        weight=weight.as_strided(weight.shape, (weight.shape[1], 1)), bias=linear.bias
    )


def test_weights_read_in_another_order_are_refused_and_the_output_is_named() -> None:
    # Of gradients, those of norms may be the furthest off.
    fusion = fuse(make("GPT2"), ByAddress(), {})
    for row in fusion.rows:
        assert not row.fused
        assert row.reason is not None
        assert [part.split(" differs")[0] for part in row.reason.split("; ")] == [
            "the output of its fused form",
            "the output of its fused form",
        ]


def test_a_model_without_blocks_is_left_alone() -> None:
    model = transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(vocab_size=64, dim=32, n_layers=1, n_heads=2, hidden_dim=32)
    )
    fusion = fuse(model, PlainParts(), {})
    assert fusion.rows == []
    assert not fusion.whole
