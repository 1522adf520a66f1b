"""Fusion within a conversion: rows, restoring, falling back, adapters, and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fp8core.conversion import convert, restore, restore_layers
from fp8core.data.attention import model_inputs
from fp8core.fusion import fused_inputs
from fp8core.fusion.plain import PlainParts
from fp8core.models import export
from fp8core.spec import Conversion
from tests.fp8core.conversion.conftest import PlainEngine
from tests.fp8core.fusion.families import batches, make


class FusingEngine(PlainEngine):
    """An engine of PyTorch's own operations that fuses blocks in them."""

    fuses_what_it_keeps = False

    def fusion_refusal(self) -> str | None:
        return None

    def block_parts(self) -> PlainParts:
        return PlainParts()


def logits(model: Any, *, fused: bool) -> Tensor:
    """Of the packed batch, at its real tokens."""
    batch = batches()["packed"]
    inputs = (
        fused_inputs(model, batch, torch.float32) if fused else model_inputs(batch, model.config)
    )
    found: Tensor = model(**{**inputs, "use_cache": False}).logits.detach()
    return found[batch.document_ids >= 0]


def rows_of(report: Any) -> dict[str, dict[str, str | None]]:
    return {row["name"]: row for row in report.to_json()}


def test_rows_say_what_each_layer_became_part_of() -> None:
    model = make("Llama")
    report = convert(model, FusingEngine(), Conversion())
    rows = rows_of(report)
    half = "model.layers.1.self_attn"
    assert rows[f"{half}.q_proj"]["to"] == "NormLinear"
    assert rows[f"{half}.q_proj"]["group"] == half
    assert rows["model.layers.1.input_layernorm"]["group"] == half
    assert rows[f"{half}.o_proj"]["to"] == "Linear"
    assert rows["model.layers.1.mlp.up_proj"]["to"] == "NormMLP"
    assert rows["model.layers.1"] == {
        "name": "model.layers.1",
        "from": "LlamaDecoderLayer",
        "to": "FusedLlamaDecoderLayer",
        "group": None,
        "reason": None,
    }
    assert rows["model.norm"]["group"] is None
    assert len(report.rows) == 2 * 9 + 2


def test_none_fuses_nothing() -> None:
    model = make("Llama")
    report = convert(model, FusingEngine(), Conversion(fuse="none"))
    assert report.fusion is None
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_a_model_without_blocks_that_are_known_is_not_fused_and_the_report_says_so() -> None:
    model = transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(vocab_size=64, dim=32, n_layers=1, n_heads=2, hidden_dim=32)
    )
    report = convert(model, FusingEngine(), Conversion())
    (row,) = report.others
    assert (row.name, row.to) == ("blocks", None)
    assert str(row.reason).startswith("the model has no blocks built as Llama's, GPT-2's or BERT's")


def test_a_model_of_gpt2_keeps_its_names_through_fusion_and_restoring(tmp_path: Path) -> None:
    model = make("GPT2")
    expected, keys = logits(model, fused=False), list(model.state_dict())
    report = convert(model, FusingEngine(), Conversion())
    rows = rows_of(report)
    assert rows["transformer.h.1.attn.c_attn"]["group"] == "transformer.h.1.attn"
    assert rows["transformer.h.1.mlp.c_fc"]["to"] == "NormMLP"
    assert rows["transformer.h.1"]["to"] == "FusedGPT2Block"
    torch.testing.assert_close(logits(model, fused=True), expected, rtol=1e-3, atol=1e-4)
    assert list(model.state_dict()) == keys
    export(model, report, None, tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded, fused=False), expected)
    restore(model, report)
    assert torch.equal(logits(model, fused=False), expected)


def test_what_the_user_keeps_is_not_fused() -> None:
    model = make("Llama")
    report = convert(model, FusingEngine(), Conversion(skip=["model.layers.0.mlp.down_proj"]))
    rows = rows_of(report)
    assert rows["model.layers.0.mlp.gate_proj"]["group"] is None
    assert rows["model.layers.0.mlp.gate_proj"]["reason"] is None
    assert "down_proj is kept: conversion.skip" in str(rows["model.layers.0"]["reason"])
    assert rows["model.layers.1.mlp.up_proj"]["group"] == "model.layers.1.mlp"


def test_layers_can_be_put_back_and_all_restored() -> None:
    model = make("Llama")
    expected = logits(model, fused=False)
    report = convert(model, FusingEngine(), Conversion())
    torch.testing.assert_close(logits(model, fused=True), expected, rtol=1e-3, atol=1e-4)
    restore_layers(report, {"model.layers.0.mlp.up_proj": "for a test"})
    rows = rows_of(report)
    assert rows["model.layers.0.mlp.up_proj"]["reason"] == "for a test"
    assert "it was fused in model.layers.0.mlp" in str(
        rows["model.layers.0.mlp.down_proj"]["reason"]
    )
    assert rows["model.layers.0.mlp.down_proj"]["to"] is None
    assert rows["model.layers.0.self_attn.q_proj"]["reason"] is None
    torch.testing.assert_close(logits(model, fused=True), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(KeyError, match="not converted"):
        restore_layers(report, {"model.layers.0.mlp.up_proj": "twice"})
    restore(model, report)
    assert type(model.model.layers[1]).__name__ == "LlamaDecoderLayer"
    assert torch.equal(logits(model, fused=False), expected)


def test_an_export_of_a_fused_model_loads_as_the_plain_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make("Llama", tie_word_embeddings=True)
    report = convert(model, FusingEngine(), Conversion())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.25)
    expected = logits(model, fused=True)
    export(model, report, None, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    torch.testing.assert_close(logits(loaded, fused=False), expected, rtol=1e-3, atol=1e-4)
