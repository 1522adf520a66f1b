"""Planned memory against what an H200 used."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8core.models import plan
from fp8core.spec import parse_spec

MEASURED = {
    # Peak GiB of a step of the Llama-3.2-3B shape, 2 x 4096 tokens, on an H200, without a mask.
    "bf16 throughout": ({"engine": "amp"}, "throughput", {"fuse": "none"}, 58.0),
    "bf16 throughout, fused": ({"engine": "amp"}, "throughput", {}, 40.2),
    "fp32 under bf16 autocast": ({"engine": "amp"}, "method", {"fuse": "none"}, 88.6),
    "te delayed, bf16 stored, head in FP8": ({}, "throughput", {"output_head": True}, 43.4),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_near_what_an_h200_used(make_spec, name):
    recipe, precision, conversion, measured = MEASURED[name]
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "head_dim": 128,
        "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    training = {"batch_size": 2, "sequence_length": 4096, "precision": precision}
    made = plan(make_spec(config, training=training, recipe=recipe, conversion=conversion))
    assert made.memory["total"] / 2**30 == pytest.approx(measured, rel=0.02)
    assert made.memory["total"] == max(made.memory_moments.values())


MEASURED_8B = {
    # The same of the Llama-3-8B shape, whose head is not its embedding, in FP8 too.
    "bf16 throughout": ("throughput", {}, 87.5),
    "8-bit states": ("memory", {"recomputed_blocks": 4}, 68.3),
    "8-bit states, stored in fp32": (
        {"preset": "memory", "weights": "fp32"}, {"recomputed_blocks": 4}, 83.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED_8B)
def test_the_estimate_of_an_8b_model_is_near_what_an_h200_used(make_spec, name):
    precision, recompute, measured = MEASURED_8B[name]
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    training = {"batch_size": 2, "sequence_length": 4096, "precision": precision, **recompute}
    training["gradient_checkpointing"] = bool(recompute)
    made = plan(make_spec(config, training=training, recipe={}, conversion={"output_head": True}))
    assert made.memory["total"] / 2**30 == pytest.approx(measured, rel=0.01)


MEASURED_1B = {
    # The same of the Llama-3.2-1B shape, the head in bf16 (docs/recipes.md).
    "all GEMMs in FP8": ({}, "auto", 18.7),
    "wgrad in bf16": ({"override_linear_precision": [False, False, True]}, "auto", 20.6),
    "wgrad in bf16, not fused": (
        {"override_linear_precision": [False, False, True]}, "none", 31.9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED_1B)
def test_the_estimate_of_chosen_gemms_is_near_what_an_h200_used(make_spec, name):
    recipe, fuse, measured = MEASURED_1B[name]
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    training = {"batch_size": 2, "sequence_length": 4096, "precision": "throughput"}
    recipe = {"engine": "te", **recipe}
    conversion = {"fuse": fuse, "small_gemm": "off"}
    made = plan(make_spec(config, training=training, recipe=recipe, conversion=conversion))
    assert made.memory["total"] / 2**30 == pytest.approx(measured, rel=0.01)


MEASURED_ADAPTERS = {
    # Peak GiB of a step of LoRA beside six blocks of the 3B shape's widths (docs/performance.md).
    ("linear", None): 7.14,
    ("linear", "fp8"): 6.03,
    ("q and v", None): 6.04,
    ("q and v", "fp8"): 4.96,
}


@pytest.mark.parametrize(("targets", "base"), MEASURED_ADAPTERS)
def test_the_estimate_beside_a_frozen_base_is_near_what_an_h200_used(make_spec, targets, base):
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 3072, "head_dim": 128,
        "intermediate_size": 8192, "num_hidden_layers": 6, "num_attention_heads": 24,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    training = {"batch_size": 2, "sequence_length": 4096, "precision": {"weights": "bf16"}}
    adapter = {"type": "lora", "rank": 16, "base_weights": base}
    if targets == "q and v":
        adapter["target_modules"] = ["*q_proj", "*v_proj"]
    made = plan(
        make_spec(
            config,
            training=training,
            recipe={"engine": "te"},
            conversion={"small_gemm": "off"},
            adapter=adapter,
        )
    )
    measured = MEASURED_ADAPTERS[targets, base]
    assert made.memory["total"] / 2**30 == pytest.approx(measured, rel=0.05)


MEASURED_RUNS = {
    # Peak GiB of whole runs of the trainer on an H200, 2 x 2048 tokens, stored in fp32.
    "bf16, layer by layer": {"125M": 5.28, "1B": 30.01, "3B": 65.24},
    "bf16": {"125M": 3.38, "1B": 22.88, "3B": 54.77},
    "te": {"125M": 3.08, "1B": 20.96, "3B": 50.91},
}


@pytest.mark.parametrize("shape", ["125M", "1B", "3B"])
@pytest.mark.parametrize("recipe", MEASURED_RUNS)
def test_the_estimate_is_near_what_runs_of_three_sizes_used(recipe, shape, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    from plan_memory import spec_of

    made = plan(parse_spec(spec_of(shape, recipe, 2, 2048)))
    measured = MEASURED_RUNS[recipe][shape]
    assert made.memory["total"] / 2**30 == pytest.approx(measured, rel=0.03)
