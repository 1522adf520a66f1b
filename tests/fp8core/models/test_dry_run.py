"""Forward passes on tensors without storage against real ones."""

from __future__ import annotations

import pytest
import torch
import transformers

from fp8core import engines
from fp8core.conversion import decide
from fp8core.conversion.shape_rules import shape_rules
from fp8core.data.attention import model_inputs
from fp8core.models import load
from fp8core.models.dry_run import _batch, dry_run


@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("recipe", [{"engine": "amp", "dtype": "fp32"}, {"engine": "amp"}])
def test_the_dry_run_counts_what_a_real_forward_pass_keeps(
    make_spec, llama_config, recipe, experts
):
    training = {"batch_size": 2, "sequence_length": 64}
    if experts:
        mixture = {"num_local_experts": experts, "num_experts_per_tok": 2, "sliding_window": None}
        llama_config = {**llama_config, "model_type": "mixtral", **mixture}
    spec = make_spec(llama_config, recipe=recipe, training=training)
    model = load(spec, device="cpu", dtype=torch.float32).model.train()
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = tensor
        return tensor

    inputs = model_inputs(_batch(spec), model.config)
    if recipe.get("dtype") != "fp32":
        # As on a GPU in bf16: causal attention that makes no mask.
        inputs = {"input_ids": inputs["input_ids"]}
    with (
        engines.create(spec.recipe, "cpu").training_context(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model(**inputs, use_cache=False)
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    with torch.device("meta"):
        meta = type(model)._from_config(model.config, dtype=torch.float32)
    run = dry_run(meta, [], list(meta.model.layers), spec)
    assert run.total == pytest.approx(real, rel=0.02)
    assert len(run.blocks) == 2
    assert run.logits == 2 * 64 * 272


def test_the_dry_run_takes_the_linear_layers_of_gpt2(make_spec):
    sizes = {"vocab_size": 272, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128}
    spec = make_spec({"model_type": "gpt2", **sizes}, recipe={"engine": "te"})
    with torch.device("meta"):
        meta = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    decisions = decide(meta, shape_rules(spec.recipe), spec.conversion)
    converted = [d for d in decisions if d.reason is None and d.norm is None]
    assert {type(d.layer.module).__name__ for d in converted} == {"Conv1D"}
    run = dry_run(meta, decisions, list(meta.transformer.h), spec)
    tokens = spec.training.batch_size * 64
    assert run.logits == tokens * 272
    # The inputs of four GEMMs and their weights both ways round, in FP8, and much more.
    assert run.blocks[0] > tokens * (3 * 64 + 256) + 2 * 12 * 64 * 64
