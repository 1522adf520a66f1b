"""Attention over documents' bounds against masks, and rows that need no mask at all."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from fp8core.conversion import convert
from fp8core.data.attention import BY_DOCUMENTS, model_inputs
from fp8core.data.batch import Batch
from fp8core.engines.torchao_engine import TorchaoEngine
from fp8core.fusion import documents, fuse, fused_inputs
from fp8core.fusion.documents import attend_by_documents, is_plainly_causal, switch_to_documents
from fp8core.fusion.plain import PlainParts
from fp8core.fusion.sequences import Sequences, document_bounds
from fp8core.spec import Conversion, TorchaoRecipe
from tests.fp8core.fusion.families import LENGTH, ROWS, batches, make

CPU = torch.device("cpu")
FAMILIES = ["Llama", "Qwen2, sliding and full", "Qwen3", "Mistral", "Gemma"]


def whole_rows() -> Batch:
    """Packed, each row one document."""
    batch = batches()["packed"]
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return replace(batch, document_ids=torch.zeros_like(batch.document_ids), position_ids=places)


def switch(model: Any) -> str | None:
    return switch_to_documents(model, nullcontext, CPU)


def outcome(model: Any, inputs: dict[str, Any], real: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(**{"use_cache": False, **inputs}).logits[real]
    (logits.square() * torch.linspace(0.1, 1.0, logits.shape[-1])).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of each attention that is computed: whether it has a mask, and whether it is causal."""
    seen: list[tuple[bool, bool]] = []
    own = F.scaled_dot_product_attention

    def watched(*tensors: Any, **options: Any) -> Tensor:
        mask = options.get("attn_mask")
        seen.append((mask is not None, bool(options.get("is_causal"))))
        return own(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_by_documents_computes_what_masks_do(family: str) -> None:
    model = make(family)
    given = {**batches(), "whole": whole_rows()}
    expected = {
        kind: outcome(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in given.items()
    }
    assert switch(model) is None
    for kind, batch in given.items():
        inputs = fused_inputs(model, batch, torch.float32)
        assert inputs["attention_mask"].numel() == 1
        logits, gradients = outcome(model, inputs, batch.document_ids >= 0)
        torch.testing.assert_close(logits, expected[kind][0], rtol=1e-3, atol=1e-4)
        for name, gradient in gradients.items():
            apart = (gradient - expected[kind][1][name]).norm()
            assert apart <= 1e-4 * expected[kind][1][name].norm(), (kind, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_document_have_no_mask(family: str, masks: list[tuple[bool, bool]]) -> None:
    model, batch = make(family), whole_rows()
    expected = outcome(model, model_inputs(batch, model.config), batch.document_ids >= 0)
    masks.clear()
    inputs = fused_inputs(model, batch, torch.float32)
    assert inputs["attention_mask"] is None
    logits, gradients = outcome(model, inputs, batch.document_ids >= 0)
    torch.testing.assert_close(logits, expected[0], rtol=1e-3, atol=1e-4)
    for name, gradient in gradients.items():
        assert (gradient - expected[1][name]).norm() <= 1e-4 * expected[1][name].norm(), name
    windows = sum(
        getattr(layer.self_attn, "sliding_window", None) is not None for layer in model.model.layers
    )
    if family == "Mistral":
        windows = len(masks)
    assert sorted(masks) == [(False, True)] * (2 - windows) + [(True, False)] * windows


def test_parts_in_another_mode_than_the_model_stay_in_it() -> None:
    model = make("Llama")
    model.model.layers[1].eval()
    assert switch_to_documents(model, nullcontext, CPU) is None
    assert model.training
    assert [layer.mlp.training for layer in model.model.layers] == [True, False]


def test_a_trial_without_room_leaves_the_model_as_it_was() -> None:
    model = make("Llama")

    def full(*_: Any) -> None:
        if model.config._attn_implementation != "sdpa":
            raise torch.OutOfMemoryError("for a test")

    model.register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        switch_to_documents(model, nullcontext, CPU)
    assert model.config._attn_implementation == "sdpa"
    assert model.training


def test_a_model_that_looks_ahead_keeps_its_masks() -> None:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        attn_implementation="sdpa",
    )
    model = transformers.BertLMHeadModel(config)
    assert not is_plainly_causal(model)
    assert switch(model) == "not all of the model's attention is causal"
    # It is causal by the masks alone, and so must be given one.
    batch = replace(whole_rows(), input_ids=whole_rows().input_ids % 64)
    assert fused_inputs(model, batch, torch.float32)["attention_mask"].shape[-1] == LENGTH


def test_batches_of_encoders_keep_their_masks() -> None:
    model, batch = make("Llama"), replace(whole_rows(), causal=False)
    mask = fused_inputs(model, batch, torch.float32)["attention_mask"]
    assert bool(mask.all())
    assert mask.shape == (ROWS, 1, LENGTH, LENGTH)


def test_no_switch_where_there_are_no_kernels() -> None:
    model = make("Llama")
    assert "CUDA" in str(attend_by_documents(model, nullcontext, CPU))
    assert model.config._attn_implementation == "sdpa"


def test_attention_that_goes_its_own_way_is_found_out() -> None:
    model = make("Llama")
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        options.pop(documents.SEQUENCES, None)
        return own(*arguments, **options)

    attention.forward = forward
    assert switch(model) == "1 attention layers of the model do not ask its config how to attend"
    assert model.config._attn_implementation == "sdpa"


def test_a_wrong_window_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Mistral")
    own = documents._by_documents

    def blind(*tensors: Any, **options: Any) -> Any:
        return own(*tensors, **{**options, "sliding_window": None})

    monkeypatch.setattr(documents, "_by_documents", blind)
    assert "its logits differ by" in str(switch(model))
    assert model.config._attn_implementation == "sdpa"


def test_one_attention_unfused_goes_by_documents() -> None:
    model, batch = make("Llama"), batches()["packed"]
    real = batch.document_ids >= 0
    expected = model(**model_inputs(batch, model.config), use_cache=False).logits.detach()
    fusion = fuse(model, PlainParts(), {"model.layers.0.self_attn.o_proj": "for a test"})
    assert not fusion.whole
    assert switch_to_documents(model, nullcontext, CPU, fusion.attentions) is None
    inputs = fused_inputs(model, batch, torch.float32)
    assert inputs["attention_mask"].numel() == 1
    found = model(**inputs).logits.detach()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-4)


def test_gradient_checkpointing_recomputes_by_documents() -> None:
    model, batch = make("Llama"), batches()["packed"]
    assert switch(model) is None
    inputs = fused_inputs(model, batch, torch.float32)
    expected = outcome(model, inputs, batch.document_ids >= 0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = outcome(model, inputs, batch.document_ids >= 0)
    assert torch.equal(found[0], expected[0])
    for name, gradient in found[1].items():
        assert torch.equal(gradient, expected[1][name]), name


def test_generation_and_export_know_nothing_of_it(tmp_path: Path) -> None:
    model = make("Llama").eval()
    ids = torch.tensor([[5, 9, 2, 7]])
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert switch(model) is None
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    model.save_pretrained(tmp_path)
    assert BY_DOCUMENTS not in json.dumps(json.loads((tmp_path / "config.json").read_bytes()))


def test_compiled_blocks_take_bounds() -> None:
    """torchao's, whose code is made once for whole rows and once for any number of documents."""
    counted = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counted.clear()
    model = make("Llama")
    engine = TorchaoEngine(TorchaoRecipe(engine="torchao"), CPU, compile_backend="aot_eager")
    convert(model, engine, Conversion())
    assert switch_to_documents(model, engine.evaluation_context, CPU) is None
    engine.prepare(model)

    def outcome_of(batch: Batch) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        inputs = fused_inputs(model, batch, torch.bfloat16)
        assert inputs["attention_mask"].numel() == 1
        with engine.training_context():
            logits = model(**inputs).logits.float()
        logits.square().mean().backward()
        engine.after_backward()
        return logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    for cut in (None, 20, 33, 50):
        if cut is not None:
            documents = documents.clone()
            documents[:, cut:] += 1
        bounds = document_bounds(documents)
        positions = Sequences(ROWS, LENGTH, bounds).positions(CPU)
        ids = batches()["packed"].input_ids
        batch = Batch(ids, ids, None, positions, documents, 128, 128, True, bounds)
        found = outcome_of(batch)
        with torch.compiler.set_stance("force_eager"):
            expected = outcome_of(batch)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    assert not counted["graph_break"]
    # The second number of documents makes the code that takes any.
    assert counted["stats"]["unique_graphs"] == 3
    torch._dynamo.reset()
