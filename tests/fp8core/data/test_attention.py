"""No document of a packed row sees another: shown on real models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from fp8core.data.attention import attention_mask_for, model_inputs
from fp8core.data.batch import Batch

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "initializer_range": 0.5,
}
DOCUMENTS = [[[5, 6, 7, 8, 9], [10], [11, 12, 13, 14, 15, 16, 17]], [[20, 21, 22, 23]]]
CAUSAL = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "mistral": {"sliding_window": 3},
    "qwen3": {
        "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "head_dim": 8,
    },
}  # fmt: skip
ENCODERS = {"bert": {}, "roberta": {}}


def packed_batch(*, causal: bool) -> Batch:
    ids = torch.ones(2, 16, dtype=torch.int64)
    owners = torch.full((2, 16), -1, dtype=torch.int32)
    positions = torch.zeros(2, 16, dtype=torch.int64)
    for row, documents in enumerate(DOCUMENTS):
        at = 0
        for number, document in enumerate(documents):
            here = slice(at, at + len(document))
            ids[row, here] = torch.tensor(document)
            owners[row, here] = number
            positions[row, here] = torch.arange(len(document))
            at += len(document)
    labels = torch.where(owners >= 0, ids, -100)
    count = int((owners >= 0).sum())
    return Batch(ids, labels, None, positions, owners, count, count, causal)


def model_of(kind: str, auto: Any, attention: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SMALL | options))
    return auto.from_config(config, attn_implementation=attention).eval()


@torch.no_grad()
def largest_difference(model: Any, inputs: dict[str, Any], batch: Batch) -> float:
    """Of the logits in the packed batch from those of each document by itself."""
    packed = model(**inputs).logits
    assert torch.isfinite(packed).all()
    worst = 0.0
    for row, documents in enumerate(DOCUMENTS):
        for number, document in enumerate(documents):
            alone = model(input_ids=torch.tensor([document])).logits[0]
            here = packed[row][batch.document_ids[row] == number]
            worst = max(worst, float((here - alone).abs().max()))
    return worst


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", sorted(CAUSAL))
def test_causal_models_keep_documents_apart(kind: str, attention: str) -> None:
    model = model_of(kind, AutoModelForCausalLM, attention, **CAUSAL[kind])
    batch = packed_batch(causal=True)
    # The cache is on, as in most configurations: it must not bring documents together.
    assert largest_difference(model, model_inputs(batch, model.config), batch) < 1e-4
    # The test can fail: without a mask the same models do see other documents.
    unmasked = {"input_ids": batch.input_ids, "position_ids": batch.position_ids,
                "attention_mask": torch.ones(2, 16)}  # fmt: skip
    assert largest_difference(model, unmasked, batch) > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", sorted(ENCODERS))
def test_encoders_keep_documents_apart(kind: str, attention: str) -> None:
    model = model_of(kind, AutoModelForMaskedLM, attention, **ENCODERS[kind])
    batch = packed_batch(causal=False)
    assert largest_difference(model, model_inputs(batch, model.config), batch) < 1e-4
    unmasked = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    assert largest_difference(model, unmasked, batch) > 1e-2


def test_models_of_two_kinds_of_layers_get_two_masks() -> None:
    model = model_of("qwen3", AutoModelForCausalLM, "sdpa", **CAUSAL["qwen3"])
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    masks = model_inputs(packed_batch(causal=True), model.config)["attention_mask"]
    assert masks["full_attention"][0, 0, 4].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert masks["sliding_attention"][0, 0, 4].nonzero().flatten().tolist() == [2, 3, 4]


def test_bool_and_float_masks_agree_and_leave_no_row_empty() -> None:
    for causal in (True, False):
        batch = packed_batch(causal=causal)
        allowed = attention_mask_for(batch, torch.bool)
        assert allowed.shape == (2, 1, 16, 16)
        assert allowed.any(-1).all()
        added = attention_mask_for(batch, torch.bfloat16)
        assert added.dtype == torch.bfloat16
        assert torch.equal(added == 0, allowed)
        assert (added[~allowed] == torch.finfo(torch.bfloat16).min).all()
    expected = [[True, False, False], [True, True, False], [False, False, True]]
    batch = packed_batch(causal=True)
    assert attention_mask_for(batch, torch.bool)[0, 0, 3:6, 3:6].tolist() == expected


def test_under_autocast_the_mask_still_holds() -> None:
    model = model_of("llama", AutoModelForCausalLM, "sdpa")
    batch = packed_batch(causal=True)
    other = packed_batch(causal=True)
    other.input_ids[0, :5] = 50  # another first document
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        one = model(**model_inputs(batch, model.config)).logits
        two = model(**model_inputs(other, model.config)).logits
    assert torch.equal(one[0, 5:13], two[0, 5:13])
    assert not torch.equal(one[0, :5], two[0, :5])


@pytest.mark.parametrize("kind", ["bert", "llama"])
@torch.no_grad()
def test_padding_of_unpacked_batches_changes_nothing(kind: str) -> None:
    model = model_of(kind, AutoModelForSequenceClassification, "sdpa", num_labels=3)
    ids = torch.ones(2, 16, dtype=torch.int64)
    ids[0, :5] = torch.tensor([5, 6, 7, 8, 9])
    ids[1, :3] = torch.tensor([10, 11, 12])
    real = ids != 1
    owners = torch.where(real, 0, -1).to(torch.int32)
    positions = torch.arange(16).expand(2, 16)
    batch = Batch(ids, torch.tensor([0, 1]), real, positions, owners, 8, 2, kind == "llama")
    padded = model(**model_inputs(batch, model.config)).logits
    for row in range(2):
        alone = model(input_ids=ids[row][real[row]][None]).logits[0]
        assert torch.allclose(padded[row], alone, atol=1e-4)
