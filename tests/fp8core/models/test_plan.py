"""Plans against counts made by hand and against the real thing."""

from __future__ import annotations

import json

import pytest
import torch

from fp8core import engines
from fp8core.conversion import convert
from fp8core.errors import SpecRefused
from fp8core.models import load, plan


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


def test_memory_rows_follow_the_formats(make_spec, llama_config):
    method = plan(make_spec(llama_config))
    size = method.parameters["total"]
    assert method.memory["weights"] == 4 * size
    assert method.memory["master_weights"] == 0
    assert method.memory["gradients"] == 4 * size
    assert method.memory["optimizer_states"] == 8 * size
    assert method.memory["total"] == sum(v for k, v in method.memory.items() if k != "total")
    precision = {"preset": "throughput", "master_weights": "fp32"}
    fast = plan(make_spec(llama_config, training={"precision": precision}))
    assert fast.memory["weights"] == 2 * size
    assert fast.memory["master_weights"] == 4 * size
    assert fast.memory["gradients"] == 2 * size
    assert fast.memory["optimizer_states"] == 4 * size
    checkpointed = plan(make_spec(llama_config, training={"gradient_checkpointing": True}))
    assert checkpointed.memory["activations"] < method.memory["activations"]


def test_the_estimate_is_near_what_an_h200_used(make_spec):
    """Peak of a bf16 step of the Llama-3.2-3B shape with 2 x 4096 tokens: 58.0 GiB (measured)."""
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "head_dim": 128,
        "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    training = {"batch_size": 2, "sequence_length": 4096, "precision": "throughput"}
    made = plan(make_spec(config, training=training, recipe={"engine": "amp"}))
    assert made.memory["total"] / 2**30 == pytest.approx(58.0, rel=0.1)


def test_plan_and_conversion_agree(make_spec, minilm_folder, llama_config):
    for spec in (
        make_spec(llama_config, conversion={"keep_first_last": True, "skip": ["*.k_proj"]}),
        make_spec(minilm_folder, task="masked_lm"),
    ):
        made = plan(spec)
        model = load(spec, device="cpu", dtype=torch.float32).model
        report = convert(model, engines.create(spec.recipe, "cpu"), spec.conversion)
        rows = [{k: row[k] for k in ("name", "from", "reason")} for row in report.to_json()]
        assert made.conversion["rows"] == rows
        assert made.conversion["converted"] == len(report.converted)
        assert made.parameters["total"] == sum(p.numel() for p in model.parameters())


def test_engines_that_cannot_run_here_are_planned_by_their_shape_rules(make_spec, llama_config):
    odd = {**llama_config, "intermediate_size": 168}
    te = plan(make_spec(odd, recipe={}))
    assert te.conversion["kept_because"]["out_features 168 is not a multiple of 16"] == 4
    assert te.conversion["kept_because"]["in_features 168 is not a multiple of 16"] == 2
    torchao = plan(make_spec(llama_config, recipe={"engine": "torchao"}))
    assert torchao.conversion["kept_because"]["torchao converts Linear layers only"] == 5
    amp = plan(make_spec(llama_config, recipe={"engine": "amp"}))
    assert amp.conversion["converted"] == 0
    assert amp.flops.fp8_share == 0.0
    override = {"override_linear_precision": [False, False, True]}
    partly = plan(make_spec(llama_config, recipe=override)).flops.fp8_share
    whole = plan(make_spec(llama_config, recipe={})).flops.fp8_share
    assert partly == pytest.approx(whole * 2 / 3)


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
    with pytest.raises(SpecRefused, match="positions"):
        plan(make_spec(llama_config, training={"sequence_length": 256}))
