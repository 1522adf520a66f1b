"""The rows of planned memory against counts made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.conversion import decide
from fp8core.conversion.shape_rules import shape_rules
from fp8core.models import load, plan
from fp8core.models.adapter_targets import adapter_targets
from fp8core.models.memory import estimate_memory, linear_widths
from fp8core.training.adapter import attach


def test_memory_rows_follow_the_formats(make_spec, llama_config):
    method = plan(make_spec(llama_config))
    size = method.parameters["total"]
    assert method.memory["weights"] == 4 * size
    assert method.memory["master_weights"] == 0
    assert method.memory["gradients"] == 4 * size
    assert method.memory["optimizer_states"] == 8 * size
    assert method.checkpoint_bytes == 12 * size
    # Gradients and activations are not whole at the same time.
    rows = sum(v for k, v in method.memory.items() if k != "total")
    assert 0.5 * rows < method.memory["total"] < rows
    precision = {"preset": "throughput", "master_weights": "fp32"}
    fast = plan(make_spec(llama_config, training={"precision": precision}))
    assert fast.memory["weights"] == 2 * size
    assert fast.memory["master_weights"] == 4 * size
    assert fast.memory["gradients"] == 2 * size
    assert fast.memory["optimizer_states"] == 4 * size
    assert fast.checkpoint_bytes == 10 * size
    checkpointed = plan(make_spec(llama_config, training={"gradient_checkpointing": True}))
    assert checkpointed.memory["activations"] < method.memory["activations"]
    half = {"gradient_checkpointing": True, "recomputed_blocks": 1}
    halved = plan(make_spec(llama_config, training=half)).memory["activations"]
    middle = (checkpointed.memory["activations"] + method.memory["activations"]) / 2
    assert halved == pytest.approx(middle, rel=0.01)


def test_states_of_8_bits_are_counted_with_their_exponents(make_spec, llama_config):
    made = plan(make_spec(llama_config, training={"precision": "memory"}))
    norms = 64 * 5
    matrices = made.parameters["total"] - norms
    # A block for each 256 elements of a matrix; the smallest here has 64 x 32.
    assert made.memory["optimizer_states"] == 2 * (matrices + matrices // 256 + 4 * norms)
    adapted = plan(make_spec(llama_config, adapter={}, training={"precision": "memory"}))
    trained = adapted.parameters["trainable"]
    assert 2 * trained < adapted.memory["optimizer_states"] < 2.05 * trained
    assert adapted.memory["gradients"] == 2 * trained


@pytest.mark.parametrize(
    ("recipe", "training", "lasts"),
    [
        ({}, {}, True),
        ({"scaling": "current"}, {}, True),
        ({"interval": 2}, {}, False),
        ({"override_linear_precision": [False, False, True]}, {}, False),
        ({}, {"gradient_checkpointing": True}, False),
    ],
)
def test_casts_last_where_the_next_micro_batch_uses_them(
    make_spec, llama_config, recipe, training, lasts
):
    held = []
    for accumulation in (1, 2):
        training |= {"gradient_accumulation": accumulation, "precision": "throughput"}
        made = plan(make_spec(llama_config, recipe={"engine": "te", **recipe}, training=training))
        held.append(made.memory_moments["optimizer"])
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    # In both orders.
    assert held[1] - held[0] == (2 * weights if lasts else 0)


@pytest.mark.parametrize("fuse", ["auto", "none"])
def test_a_dgrad_in_bf16_keeps_no_cast_of_the_weights(make_spec, llama_config, fuse):
    made = []
    for override in ([False, True, False], [True, False, False]):
        recipe = {"engine": "te", "override_linear_precision": override}
        training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
        spec = make_spec(llama_config, recipe=recipe, training=training, conversion={"fuse": fuse})
        made.append(plan(spec).memory)
    without, with_casts = made
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    assert without["compute_weight_copies"] == 0
    assert with_casts["compute_weight_copies"] == 2 * weights
    assert without["activations"] == with_casts["activations"]


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_backward_gemms_in_bf16_leave_one_cast_and_perhaps_a_copy(
    make_spec, llama_config, backward, fuse
):
    """Of weights in fp32 dgrad in high precision reads a copy in bf16, which lasts no longer."""
    recipe = {"engine": "te", "scaling": "block", "backward_override": backward}
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    other = {"method": 2 * 64 * 272, "throughput": 0}  # autocast's copy of the head's weight
    activations = {}
    for precision in ("method", "throughput"):
        held = []
        for accumulation in (1, 2):
            training = {"gradient_accumulation": accumulation, "precision": precision}
            training |= {"batch_size": 2, "sequence_length": 64}
            spec = make_spec(
                llama_config, recipe=recipe, training=training, conversion={"fuse": fuse}
            )
            made = plan(spec)
            copy = 2 if (backward, precision) == ("high_precision", "method") else 0
            copies = (1 + copy) * weights + other[precision]
            assert made.memory["compute_weight_copies"] == copies
            held.append(made.memory_moments["optimizer"])
        assert held[1] - held[0] == weights + other[precision]
        activations[precision] = made.memory["activations"]
    # The casts and copies are no activations. In fp32 the residual stream and the loss differ.
    assert activations["method"] >= activations["throughput"]


@pytest.mark.parametrize("separate", [False, True])
def test_input_projections_of_torchs_attention_have_copies_too(make_spec, llama_config, separate):
    widths = {"kdim": 32, "vdim": 32} if separate else {}
    copies = {}
    for engine in ("te", "amp"):
        with torch.device("meta"):
            attention = torch.nn.MultiheadAttention(64, 4, **widths)
            model = torch.nn.Sequential(attention, torch.nn.Linear(64, 64))
        spec = make_spec(llama_config, recipe={"engine": engine})
        decisions = decide(model, shape_rules(spec.recipe), spec.conversion)
        estimate = estimate_memory(model, decisions, spec, tokens=128)
        copies[engine] = estimate.rows["compute_weight_copies"]
    weights = 64 * (64 + 32 + 32 if separate else 3 * 64) + 2 * 64 * 64
    # FP8 in the order that dgrad reads; autocast's bf16.
    assert copies == {"te": weights, "amp": 2 * weights}


def test_adapters_need_gradients_and_states_of_their_own_only(make_spec, llama_config):
    whole = plan(make_spec(llama_config))
    adapted = plan(make_spec(llama_config, adapter={"rank": 4}))
    # Two blocks of q, k, v, o, gate, up, down: 64 features, 32 of keys and values, 160 inside.
    trained = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))
    assert adapted.parameters["trainable"] == trained
    assert adapted.parameters["total"] == whole.parameters["total"] + trained
    assert adapted.memory["gradients"] == 4 * trained
    assert adapted.memory["optimizer_states"] == 8 * trained
    assert adapted.memory["weights"] == whole.memory["weights"] + 4 * trained
    assert adapted.memory["activations"] > 0
    assert adapted.checkpoint_bytes == 12 * trained


@pytest.mark.parametrize("precision", ["method", "throughput"])
@pytest.mark.parametrize("engine", ["te", "emulated"])
def test_a_frozen_base_in_fp8_takes_a_byte_a_weight(make_spec, llama_config, engine, precision):
    fields = {"recipe": {"engine": engine}, "training": {"precision": precision}}
    plain = plan(make_spec(llama_config, adapter={"rank": 4}, **fields))
    stored = plan(make_spec(llama_config, adapter={"rank": 4, "base_weights": "fp8"}, **fields))
    bytes_before = 4 if precision == "method" else 2
    layers = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160)
    saved = plain.memory["weights"] - stored.memory["weights"]
    assert saved == (bytes_before - 1) * layers
    # What dgrad turns over: gate and up, and down, of one block, where they are one module.
    turned = 3 * 64 * 160 if engine == "te" else 0
    copies = plain.memory["compute_weight_copies"] - stored.memory["compute_weight_copies"]
    assert copies == layers - turned
    # Nothing behind the first q, k and v wants a gradient, whose casts wait for no backward pass.
    unread = 64 * 64 + 2 * 64 * 32 if engine == "emulated" else 0
    assert stored.memory["activations"] - plain.memory["activations"] == unread
    moment = "gradient of the loss"
    waited = plain.memory_moments[moment] - stored.memory_moments[moment] - saved
    assert waited == layers - unread
    base = plain.parameters["total"] - plain.parameters["trainable"]
    assert stored.memory_moments["loading"] == bytes_before * base
    assert "loading" not in plain.memory_moments
    assert stored.checkpoint_bytes == plain.checkpoint_bytes


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("engine", ["te", "emulated"])
def test_a_head_that_shares_its_weight_is_cast_beside_a_base_in_fp8(
    make_spec, llama_config, engine, accumulation
):
    config = {**llama_config, "tie_word_embeddings": True}
    fields = {
        "recipe": {"engine": engine, "scaling": "current"},
        "training": {"gradient_accumulation": accumulation},
    }

    def planned(base: str | None) -> list[Any]:
        adapter = {"rank": 4, "base_weights": base}
        conversions = [{"output_head": head} for head in (False, True)]
        return [
            plan(make_spec(config, adapter=adapter, conversion=conversion, **fields))
            for conversion in conversions
        ]

    made, plain = planned("fp8"), planned(None)
    table = 64 * config["vocab_size"]
    # FP8 in the place of autocast's bf16; both orders where the next micro-batch reads them too.
    kept = engine == "te" and accumulation == 2
    copies = [one.memory["compute_weight_copies"] for one in made]
    assert copies[1] - copies[0] == ((2 if kept else 1) - 2) * table
    assert made[1].memory["weights"] == made[0].memory["weights"]
    ends = [one.memory_moments["optimizer"] for one in made]
    assert ends[1] - ends[0] == (2 * table if kept else 0)
    # What the head keeps for its backward pass is what it keeps beside any base.
    kept_by_head, beside_any = (
        two[1].memory["activations"] - two[0].memory["activations"] for two in (made, plain)
    )
    assert kept_by_head == beside_any


def test_heads_that_are_trained_beside_adapters_are_counted(make_spec, minilm_folder):
    """A classifier's head and pooler, of which a copy is trained as a whole."""
    spec = make_spec(minilm_folder, task="sequence_classification", adapter={"rank": 4})
    made = plan(spec)
    model = load(spec, device="cpu", dtype=torch.float32, class_labels=["no", "yes"]).model
    targets = adapter_targets(model, spec.adapter)
    attach(spec, model, targets)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained > sum(4 * sum(linear_widths(layer.module)) for layer in targets)
    assert made.parameters["trainable"] == trained
    assert made.parameters["total"] == sum(p.numel() for p in model.parameters())
    assert made.memory["gradients"] == 4 * trained
    assert made.memory["optimizer_states"] == 8 * trained
    assert made.memory["weights"] == 4 * made.parameters["total"]
    assert made.checkpoint_bytes == 12 * trained
