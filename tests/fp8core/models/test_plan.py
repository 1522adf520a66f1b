"""Parameters, tokens and work of plans against counts made by hand."""

from __future__ import annotations

import json

import pytest

from fp8core.errors import SpecRefused
from fp8core.models import plan


def test_parameters_tokens_and_flops_by_hand(make_spec, llama_config):
    spec = make_spec(
        llama_config,
        training={"batch_size": 2, "sequence_length": 64, "gradient_accumulation": 3},
    )
    made = plan(spec)
    attention = 64 * 64 * 2 + 64 * 32 * 2
    gemm_weights = 2 * (attention + 3 * 64 * 160) + 64 * 272
    total = gemm_weights + 272 * 64 + (2 * 2 + 1) * 64
    assert made.parameters == {"total": total, "trainable": total, "embedding": 272 * 64}
    assert made.tokens_per_step == 2 * 64 * 3
    assert made.flops.gemm == 6 * gemm_weights * made.tokens_per_step
    assert made.flops.attention == 12 * 2 * 4 * 16 * 64 * made.tokens_per_step
    assert made.flops.total == made.flops.gemm + made.flops.attention
    assert made.flops.fp8_share == pytest.approx(1 - 64 * 272 / gemm_weights)
    json.dumps(made.to_json())


def test_a_tied_head_counts_once_as_parameters_and_fully_as_work(make_spec, llama_config):
    untied = plan(make_spec(llama_config))
    tied = plan(make_spec({**llama_config, "tie_word_embeddings": True}))
    assert untied.parameters["total"] - tied.parameters["total"] == 64 * 272
    assert untied.flops == tied.flops


def test_experts_count_as_far_as_tokens_are_sent_to_them(make_spec):
    config = {
        "model_type": "mixtral", "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    made = plan(make_spec(config))
    gemm = 4 * 64 * 64 + 2 * 3 * 64 * 96 + 64 * 272
    assert made.flops.gemm == 6 * gemm * made.tokens_per_step


def test_the_vocabulary_comes_from_the_tokenizer(make_spec, llama_config, make_tokenizer):
    del llama_config["vocab_size"]
    assert plan(make_spec(llama_config)).parameters["embedding"] == 272 * 64
    trained = make_spec(llama_config, tokenizer={"source": "train", "vocab_size": 4096})
    assert plan(trained).parameters["embedding"] == 4096 * 64
    foreign = make_spec(llama_config, tokenizer={"source": "path", "path": "t"})
    with pytest.raises(SpecRefused, match="give it") as caught:
        plan(foreign)
    assert caught.value.pointer == "/model/config/vocab_size"
    assert plan(foreign, tokenizer=make_tokenizer(500)).parameters["embedding"] == 512 * 64


def test_refusals(make_spec, llama_config):
    with pytest.raises(SpecRefused, match="'lm_haed' matches no"):
        plan(make_spec(llama_config, conversion={"skip": ["lm_haed"]}))
