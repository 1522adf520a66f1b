"""What a plan says of steps as CUDA graphs."""

from __future__ import annotations

import pytest

from fp8core.models import plan


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({}, None),
        ({"training": {"cuda_graphs": "off"}}, "training.cuda_graphs is off"),
        ({"conversion": {"fuse": "none"}}, "not all blocks are fused in both halves"),
        ({"training": {"gradient_accumulation": 2}}, "more than 1"),
    ],
)
def test_graphs_are_told_of_and_in_no_total(make_spec, llama_config, fields, refusal):
    te = {"recipe": {"engine": "te"}}
    made = plan(make_spec(llama_config, **te, **fields))
    graphs = made.cuda_graphs
    if refusal is None:
        assert graphs["refusal"] is None
        # The condition of the trainer: `fp8core.training.step_graphs`.
        assert graphs["bytes_needed"] == 2 * made.memory["total"]
        assert str(graphs["says"]).startswith("not counted; captured where the GPU has ")
        off = plan(make_spec(llama_config, **te, training={"cuda_graphs": "off"}))
        assert off.memory == made.memory
    else:
        assert refusal in str(graphs["refusal"])
        assert graphs["bytes_needed"] is None
        assert graphs["says"] == f"none: {graphs['refusal']}"


@pytest.mark.parametrize(
    ("dropout", "refusal"), [(0.0, None), (0.1, "the model drops out activations")]
)
def test_graphs_are_none_where_the_embeddings_drop_out(make_spec, dropout, refusal):
    """Blocks without dropout are fused all the same."""
    rates = {"embd_pdrop": dropout, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
    made = plan(make_spec(gpt2 | rates, recipe={"engine": "te"}))
    assert made.fusion["fused"] == 2
    assert made.cuda_graphs["refusal"] == refusal


def test_a_plan_without_a_gpu_has_no_graphs(make_spec, llama_config):
    recipe = {"engine": "amp", "dtype": "bf16"}
    made = plan(make_spec(llama_config, recipe=recipe, resources={"device": "cpu"}))
    assert made.cuda_graphs["refusal"] == "there are graphs on CUDA devices only"
