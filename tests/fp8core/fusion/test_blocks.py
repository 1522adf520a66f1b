"""Fused blocks against transformers' own: numbers, names, and what must not change."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fp8core.data.attention import model_inputs
from fp8core.fusion import FusedBlock, fuse, fused_inputs
from fp8core.fusion.documents import SEQUENCES
from fp8core.fusion.joined import lie_together
from fp8core.fusion.plain import PlainParts
from fp8core.fusion.sequences import Sequences
from tests.fp8core.fusion.families import FAMILIES, LENGTH, ROWS, batches, make


def outputs(model: Any, inputs: dict[str, Any], real: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits at real tokens, and the gradients of a sum over them by parameter."""
    model.zero_grad()
    logits = model(**{"use_cache": False, **inputs}).logits[real]
    (logits.square() * torch.linspace(0.1, 1.0, logits.shape[-1])).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the blocks that took the fused way."""
    calls: list[str] = []
    own = FusedBlock.__call__

    def counting(self: FusedBlock, *arguments: Any) -> Tensor:
        calls.append(self.name)
        return own(self, *arguments)

    monkeypatch.setattr(FusedBlock, "__call__", counting)
    return calls


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_fused_model_computes_what_the_plain_one_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(family)
    plain = {
        kind: outputs(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in batches().items()
    }
    fusion = fuse(model, PlainParts(), {})
    assert [row.reason for row in fusion.rows] == [None, None]
    assert fusion.whole
    calls = counted(monkeypatch)
    for kind, batch in batches().items():
        real = batch.document_ids >= 0
        logits, gradients = outputs(model, fused_inputs(model, batch, torch.float32), real)
        expected, expected_gradients = plain[kind]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        for name, gradient in gradients.items():
            apart = (gradient - expected_gradients[name]).norm()
            assert apart <= 1e-4 * expected_gradients[name].norm(), (kind, name)
    blocks = "transformer.h" if family == "GPT2" else "model.layers"
    assert calls == [f"{blocks}.0", f"{blocks}.1"] * 2


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma"])
def test_names_parameters_and_ties_stay(family: str) -> None:
    model = make(family, tie_word_embeddings=True)
    before = dict(model.named_parameters(remove_duplicate=False))
    values = {name: p.detach().clone() for name, p in before.items()}
    keys, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    fuse(model, PlainParts(), {})
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == modules
    for name, parameter in after.items():
        assert parameter is before[name]
        assert torch.equal(parameter, values[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    attention = model.model.layers[0].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert lie_together(weights)


def test_an_update_in_place_reaches_the_fused_weights() -> None:
    model = make("Llama")
    fuse(model, PlainParts(), {})
    batch = batches()["padded"]
    inputs = fused_inputs(model, batch, torch.float32)
    first = model(**inputs).logits.detach()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    second = model(**inputs).logits.detach()
    assert not torch.allclose(first, second)
    plain = model(**model_inputs(batch, model.config), use_cache=False).logits.detach()
    real = batch.document_ids >= 0
    torch.testing.assert_close(second[real], plain[real], rtol=1e-3, atol=1e-4)


def test_values_that_were_moved_apart_are_joined_all_the_same() -> None:
    model = make("Llama")
    fuse(model, PlainParts(), {})
    inputs = fused_inputs(model, batches()["packed"], torch.float32)
    expected = model(**inputs).logits.detach()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    assert not lie_together([model.model.layers[0].mlp.gate_proj.weight, weight])
    assert torch.equal(model(**inputs).logits, expected)


def test_a_kept_layer_keeps_its_half_apart_and_says_why() -> None:
    model = make("Llama")
    kept = {"model.layers.1.mlp.down_proj": "conversion.skip names it"}
    fusion = fuse(model, PlainParts(), kept)
    first, second = fusion.rows
    assert first.reason is None
    assert second.fused == ("model.layers.1.self_attn",)
    assert second.reason == "model.layers.1.mlp.down_proj is kept: conversion.skip names it"
    assert fusion.whole
    assert "model.layers.1.mlp.gate_proj" not in fusion.layers


def test_where_one_attention_is_plain_masks_are_made() -> None:
    model = make("Llama")
    batch = batches()["packed"]
    expected = model(**model_inputs(batch, model.config), use_cache=False).logits.detach()
    fusion = fuse(model, PlainParts(), {"model.layers.0.self_attn.o_proj": "for a test"})
    assert not fusion.whole
    inputs = fused_inputs(model, batch, torch.float32)
    assert inputs["attention_mask"].shape == (ROWS, 1, LENGTH, LENGTH)
    real = batch.document_ids >= 0
    found = model(**inputs, use_cache=False).logits.detach()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-4)


def test_where_there_is_attention_outside_of_blocks_masks_are_made() -> None:
    """It would look ahead without, and over the bounds of documents."""

    class Attention(nn.Module):
        is_causal = True

    model = make("Llama")
    model.model.another = Attention()
    fusion = fuse(model, PlainParts(), {})
    assert len(fusion.attentions) == fusion.candidates == 2
    assert not fusion.whole
    inputs = fused_inputs(model, batches()["packed"], torch.float32)
    assert inputs["attention_mask"].shape == (ROWS, 1, LENGTH, LENGTH)


def test_generation_goes_the_models_own_way() -> None:
    model = make("Llama").eval()
    ids = torch.tensor([[5, 9, 2, 7]])
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    fuse(model, PlainParts(), {})
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_removing_gives_the_layers_back() -> None:
    model = make("Llama")
    fusion = fuse(model, PlainParts(), {})
    kinds = {type(layer).__name__ for layer in model.model.layers}
    assert kinds == {"FusedLlamaDecoderLayer"}
    removed = fusion.remove(["model.layers.0.mlp.up_proj"])
    assert set(removed.values()) == {"model.layers.0.mlp"}
    assert "model.layers.0.self_attn.q_proj" in fusion.layers
    fusion.remove_all()
    assert {type(layer).__name__ for layer in model.model.layers} == {"LlamaDecoderLayer"}
    assert fusion.layers == {}


def test_gradient_checkpointing_recomputes_the_fused_way(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batches()["packed"]
    real = batch.document_ids >= 0
    model = make("Llama")
    fuse(model, PlainParts(), {})
    inputs = fused_inputs(model, batch, torch.float32)
    expected = outputs(model, inputs, real)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = counted(monkeypatch)
    logits, gradients = outputs(model, inputs, real)
    assert len(calls) == 4  # two blocks, twice
    assert torch.equal(logits, expected[0])
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[1][name]), name


def test_what_goes_the_models_own_way_in_training_is_warned_of() -> None:
    batch = batches()["packed"]
    model = make("Llama")
    fuse(model, PlainParts(), {})
    with pytest.warns(UserWarning, match="without FP8"):
        model(**model_inputs(batch, model.config), use_cache=False)
    with pytest.warns(UserWarning, match="without FP8"):
        model(batch.input_ids)  # makes a key-value cache
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**fused_inputs(model, batch, torch.float32))
        model(batch.input_ids, use_cache=False)
        model.eval()
        model.generate(batch.input_ids[:1, :4], max_new_tokens=2, do_sample=False)


def test_rows_told_by_positions_alone_go_the_models_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models make no masks for flash attention, even where rows hold several documents."""
    ids = batches()["packed"].input_ids
    model = make("Llama")
    fuse(model, PlainParts(), {})
    calls = counted(monkeypatch)
    model(ids, use_cache=False)
    assert len(calls) == 2
    model.config._attn_implementation_internal = "flash_attention_2"
    for layer in model.model.layers:
        # What the model itself would call is not installed here.
        monkeypatch.setattr(
            layer.self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
        )
    with pytest.warns(UserWarning, match="without FP8"):
        model(ids, use_cache=False)
    assert len(calls) == 2


@pytest.mark.parametrize("kept", ["attn.c_proj", "mlp.c_fc"])
def test_half_a_block_of_gpt2_is_fused_where_the_other_is_kept(kept: str) -> None:
    model, batch = make("GPT2"), batches()["packed"]
    real = batch.document_ids >= 0
    expected = outputs(model, model_inputs(batch, model.config), real)
    fusion = fuse(model, PlainParts(), {f"transformer.h.0.{kept}": "for a test"})
    other = "mlp" if kept.startswith("attn") else "attn"
    assert fusion.rows[0].fused == (f"transformer.h.0.{other}",)
    assert fusion.rows[1].reason is None
    logits, gradients = outputs(model, fused_inputs(model, batch, torch.float32), real)
    torch.testing.assert_close(logits, expected[0], rtol=1e-3, atol=1e-4)
    for name, gradient in gradients.items():
        assert (gradient - expected[1][name]).norm() <= 1e-4 * expected[1][name].norm(), name


def test_gpt2_generates_and_recomputes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make("GPT2"), batches()["packed"]
    ids, real = torch.tensor([[5, 9, 2, 7]]), batch.document_ids >= 0
    model.eval()
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    fuse(model, PlainParts(), {})
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    model.train()
    inputs = fused_inputs(model, batch, torch.float32)
    logits, gradients = outputs(model, inputs, real)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = counted(monkeypatch)
    again = outputs(model, inputs, real)
    assert len(calls) == 4  # two blocks, twice
    assert torch.equal(again[0], logits)
    assert all(torch.equal(again[1][name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize(
    ("name", "fused_way"),
    [
        ("cache", False),
        ("past_key_value", False),
        ("layer_past", False),
        ("encoder_hidden_states", False),
        ("encoder_attention_mask", False),
        ("attention_mask", True),
        ("position_ids", True),
        ("cache_position", True),
        ("cu_seq_lens_q", True),
        ("cu_seq_lens_k", True),
        ("max_length_q", True),
        ("max_length_k", True),
        ("seq_idx", True),
        ("num_items_in_batch", True),
    ],
)
def test_what_a_fused_block_does_not_serve_goes_its_own_way(
    name: str, fused_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of what it is given beside the sequences of a batch."""
    model = make("Llama").eval()
    fuse(model, PlainParts(), {})
    calls = counted(monkeypatch)
    hidden = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    angles = model.model.rotary_emb(hidden, torch.arange(8)[None])
    given: Any = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    if name == "cache":
        given = transformers.DynamicCache()
    found = model.model.layers[0](
        hidden,
        position_embeddings=angles,
        **{SEQUENCES: Sequences(2, 8), name: given},
    )
    assert found.shape == hidden.shape
    assert len(calls) == fused_way


def test_the_head_computes_nothing_while_blocks_are_fused() -> None:
    """Its weight may be larger than a block, and under autocast it would be cast."""
    model, called = make("Llama"), []
    model.lm_head.register_forward_pre_hook(lambda *_: called.append(True))
    fusion = fuse(model, PlainParts(), {})
    assert all(len(row.fused) == 2 for row in fusion.rows)
    assert not called


def test_parts_in_another_mode_than_the_model_stay_in_it() -> None:
    """Whatever is tried of a block or of the model is tried in one mode of all its parts."""
    model = make("Llama")
    for layer in model.model.layers:
        layer.mlp.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert set(modes.values()) == {True, False}
    fusion = fuse(model, PlainParts(), {})
    assert all(len(row.fused) == 2 for row in fusion.rows)
    assert {name: module.training for name, module in model.named_modules()} == modes


@pytest.mark.parametrize(
    ("place", "half"), [("mlp.act_fn", "self_attn"), ("self_attn.q_proj", "mlp")]
)
def test_hooks_of_the_users_stay_called(place: str, half: str) -> None:
    model = make("Llama")
    called: list[str] = []
    model.model.layers[0].get_submodule(place).register_forward_hook(
        lambda *_: called.append(place)
    )
    fusion = fuse(model, PlainParts(), {})
    assert fusion.rows[0].fused == (f"model.layers.0.{half}",)
    assert f"model.layers.0.{place} has hooks" in str(fusion.rows[0].reason)
    assert fusion.rows[1].reason is None
    called.clear()
    model(**fused_inputs(model, batches()["packed"], torch.float32))
    assert called == [place]


def test_hooks_of_a_block_itself_are_called() -> None:
    model = make("Llama")
    called: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: called.append(0))
    assert fuse(model, PlainParts(), {}).rows[0].reason is None
    called.clear()
    model(**fused_inputs(model, batches()["packed"], torch.float32))
    assert called == [0]
