"""What a plan says of fusion, beside what `fuse` does with the same model."""

from __future__ import annotations

import pytest
import torch
import transformers

from fp8core.conversion import decide
from fp8core.conversion.shape_rules import shape_rules
from fp8core.fusion import PlannedAdapters, fuse
from fp8core.fusion.plain import PlainParts
from fp8core.models import plan
from fp8core.models.adapter_targets import adapter_targets
from fp8core.models.architecture import attention_implementation
from fp8core.models.planned_fusion import planned_fusion
from fp8core.spec import LoraAdapter
from tests.fp8core.fusion.berts import bert
from tests.fp8core.fusion.families import make
from tests.fp8core.fusion.weights import with_random_weights

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"hidden_act": "relu"}),
        ("Llama", {"rope_parameters": YARN}),
        ("Qwen3", {}),
        ("Gemma", {}),
        ("GPT2", {}),
        ("GPT2", {"resid_pdrop": 0.1}),
    ],
)
@pytest.mark.parametrize(("skipped", "adapted"), [(False, False), (True, False), (False, True)])
def test_what_would_be_fused_is_what_is(make_spec, llama_config, family, changes, skipped, adapted):
    one = "*.0.mlp.c_fc" if family == "GPT2" else "*.0.*up_proj"
    skip = [one] if skipped else []
    spec = make_spec(llama_config, recipe={"engine": "te"}, conversion={"skip": skip})
    model = make(family, **changes)
    with torch.device("meta"):
        meta = type(model)._from_config(model.config, dtype=torch.float32)
    targets = adapter_targets(meta, LoraAdapter()) if adapted else []
    adapters = PlannedAdapters(frozenset(layer.name for layer in targets), LoraAdapter())
    planned = planned_fusion(
        meta, decide(meta, shape_rules(spec.recipe), spec.conversion), spec, adapters.layers
    )

    decisions = decide(model, shape_rules(spec.recipe), spec.conversion)
    kept = {d.layer.name: d.reason for d in decisions if d.reason is not None}
    done = fuse(model, PlainParts(), kept, adapters=adapters)

    halves = [
        {half.name for half in (block.halves.attention, block.halves.mlp) if half is not None}
        for block in planned.blocks
    ]
    assert halves == [set(row.fused) for row in done.rows if row.fused]
    assert planned.found == done.candidates == 2
    assert planned.whole == done.whole
    told = [reason for row in done.rows for reason in (row.reason or "").split("; ") if reason]
    assert len(planned.reasons) == len(told)


def test_of_a_model_with_two_kinds_of_rotation_nothing_is_fused(make_spec, llama_config):
    """Which of them a block gets is not known, so that it cannot be compared."""
    spec = make_spec(llama_config, recipe={"engine": "te"})
    model = make("Llama")
    with torch.device("meta"):
        meta = type(model)._from_config(model.config, dtype=torch.float32)
    for each in (model, meta):
        each.model.another = type(each.model.rotary_emb)(model.config)
    planned = planned_fusion(meta, decide(meta, shape_rules(spec.recipe), spec.conversion), spec)
    done = fuse(model, PlainParts(), {})
    assert [row.fused for row in done.rows] == [(), ()]
    assert planned.blocks == ()
    assert list(planned.reasons) == [row.reason for row in done.rows]


def small(family: str, head: str, **more):
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes | more)
    kind = getattr(transformers, f"{family}{head}")
    model = kind._from_config(config, attn_implementation=attention_implementation(kind)).train()
    return with_random_weights(model)


LAYOUT = {"coordinate_size": 11, "shape_size": 10, "visual_embed": False}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
OTHERS = {
    # Biases of the scores, given to each block.
    "LayoutLMv3, biased": ("ForSequenceClassification", LAYOUT, 0),
    "LayoutLMv3": (
        "ForSequenceClassification",
        {**LAYOUT, "has_relative_attention_bias": False, "has_spatial_attention_bias": False},
        4,
    ),
    # Rotated by neighbours.
    "Ernie4_5": ("ForCausalLM", GROUPED, 2),
    "Helium": ("ForCausalLM", GROUPED, 2),
    # Half of each head is rotated.
    "Glm": ("ForCausalLM", GROUPED, 0),
    # Drops out what it adds; and what it multiplies is scaled otherwise.
    "SeedOss": ("ForCausalLM", GROUPED, 0),
    "DiffLlama": ("ForCausalLM", {"num_key_value_heads": 2}, 0),
    "Granite": ("ForCausalLM", {"num_key_value_heads": 2, "residual_multiplier": 0.5}, 0),
    "Arcee": ("ForCausalLM", GROUPED, 2),
    "Ministral": ("ForCausalLM", {**GROUPED, "sliding_window": 24}, 4),
    # Blocks that take other arguments, or that get no sequences from their model.
    "Deberta": ("ForMaskedLM", {}, 0),
    "Nystromformer": ("ForMaskedLM", {}, 0),
    "RemBert": ("ForMaskedLM", {"embedding_size": 64}, 0),
    "RoFormer": ("ForMaskedLM", {"embedding_size": 64}, 0),
    "Ernie": ("ForMaskedLM", {"task_type_vocab_size": 2}, 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_planned_as_they_are_fused(make_spec, llama_config, name):
    """Those that look like known ones too: their numbers are tried on a small twin."""
    head, more, fused = OTHERS[name]
    spec = make_spec(llama_config, recipe={"engine": "te"})
    model = small(name.split(",")[0], head, **more)
    with torch.device("meta"):
        meta = type(model)._from_config(
            model.config, attn_implementation=attention_implementation(type(model))
        )
    state, training = torch.get_rng_state(), meta.training
    planned = planned_fusion(meta, decide(meta, shape_rules(spec.recipe), spec.conversion), spec)
    assert torch.equal(torch.get_rng_state(), state)
    assert meta.training == training
    decisions = decide(model, shape_rules(spec.recipe), spec.conversion)
    kept = {d.layer.name: d.reason for d in decisions if d.reason is not None}
    done = fuse(model, PlainParts(), kept)
    halves = {
        half.name
        for block in planned.blocks
        for half in (block.halves.attention, block.halves.mlp)
        if half is not None
    }
    assert halves == {half for row in done.rows for half in row.fused}
    assert len(halves) == fused
    assert planned.found == done.candidates == 2
    assert planned.whole == done.whole
    told = sum(len(str(row.reason).split("; ")) for row in done.rows if row.reason is not None)
    assert len(planned.reasons) == told


def test_a_model_of_full_size_is_judged_by_its_twin(make_spec, llama_config):
    """Also the blocks beyond those of the twin, of which one has an MLP that is kept."""
    skip = {"skip": ["*.7.mlp.up_proj"]}
    spec = make_spec(llama_config, recipe={"engine": "te"}, conversion=skip)
    for kind, halves in (("Ernie4_5", 1), ("Llama", 2)):
        config = getattr(transformers, f"{kind}Config")(num_hidden_layers=9, head_dim=128)
        with torch.device("meta"):
            meta = getattr(transformers, f"{kind}ForCausalLM")._from_config(config)
        decisions = decide(meta, shape_rules(spec.recipe), spec.conversion)
        planned = planned_fusion(meta, decisions, spec)
        found = {
            block.name: (block.halves.attention is not None) + (block.halves.mlp is not None)
            for block in planned.blocks
        }
        expected = {f"model.layers.{index}": halves for index in range(9)}
        expected["model.layers.7"] -= 1
        assert found == {name: count for name, count in expected.items() if count}
        counts = planned.to_json()["not_because"]
        assert counts.get("the output of its fused form differs", 0) == (9 if halves == 1 else 0)


@pytest.mark.parametrize("kind", ["DeepseekV3", "Qwen3"])
def test_a_twin_that_cannot_be_called_says_nothing(make_spec, llama_config, kind):
    """Or has its heads as wide as the model's: nothing of a real model is refused for its sizes."""
    spec = make_spec(llama_config, recipe={"engine": "te"})
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512}
    if kind == "DeepseekV3":
        sizes |= {"n_routed_experts": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        meta = getattr(transformers, f"{kind}ForCausalLM")._from_config(config)
    planned = planned_fusion(meta, decide(meta, shape_rules(spec.recipe), spec.conversion), spec)
    mlps = [block.name for block in planned.blocks if block.halves.mlp is not None]
    assert mlps == ["model.layers.0", "model.layers.1"]
    assert not any("fused form" in reason for reason in planned.reasons)


def test_blocks_of_which_some_look_ahead_are_planned_as_they_are_fused(make_spec, llama_config):
    """A batch has one kind of sequences, and blocks of the other would be given the wrong one."""
    spec = make_spec(llama_config, recipe={"engine": "te"})
    model = bert()
    with torch.device("meta"):
        meta = type(model)._from_config(model.config, dtype=torch.float32)
    for each in (model, meta):
        each.bert.encoder.layer[0].attention.self.is_causal = True
    planned = planned_fusion(meta, decide(meta, shape_rules(spec.recipe), spec.conversion), spec)
    done = fuse(model, PlainParts(), {})
    assert not done.blocks
    assert not planned.blocks
    mixed = "some blocks of the model look ahead and some do not"
    assert all(str(row.reason).endswith(mixed) for row in done.rows)
    assert planned.reasons.count(mixed) == 2
    assert {type(layer).__name__ for layer in model.bert.encoder.layer} == {"BertLayer"}


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.1}, {"hidden_act": "relu"}])
def test_an_encoder_is_planned_as_it_is_fused(make_spec, llama_config, changes):
    spec = make_spec(llama_config, recipe={"engine": "te"})
    model = bert(**changes)
    with torch.device("meta"):
        meta = type(model)._from_config(model.config, dtype=torch.float32)
    planned = planned_fusion(meta, decide(meta, shape_rules(spec.recipe), spec.conversion), spec)
    decisions = decide(model, shape_rules(spec.recipe), spec.conversion)
    kept = {d.layer.name: d.reason for d in decisions if d.reason is not None}
    done = fuse(model, PlainParts(), kept)
    halves = [
        {half.name for half in (block.halves.attention, block.halves.mlp) if half is not None}
        for block in planned.blocks
    ]
    assert halves == [set(row.fused) for row in done.rows]
    assert planned.whole == done.whole
    assert len(planned.reasons) == sum(row.reason is not None for row in done.rows)


def test_the_plan_says_what_is_not_fused_and_why(make_spec, llama_config):
    te = {"engine": "te"}
    none = plan(make_spec(llama_config, recipe=te, conversion={"fuse": "none"})).fusion
    assert none["fused"] == 0
    assert none["not_because"] == {"conversion.fuse is none": 1}
    partly = plan(make_spec(llama_config, recipe=te, conversion={"skip": ["*.0.*k_proj"]})).fusion
    assert (partly["fused"], partly["fused_in_part"]) == (1, 1)
    (reason,) = partly["not_because"]
    assert reason.startswith("self_attn.k_proj is kept: ")
    adapted = plan(make_spec(llama_config, recipe=te, adapter={"target_modules": ["*.q_proj"]}))
    assert (adapted.fusion["fused"], adapted.fusion["not_because"]) == (2, {})
    all_three = {"override_linear_precision": [True, True, True]}
    made = plan(make_spec(llama_config, recipe={**te, **all_three})).fusion
    assert made["fused"] == 0
    (reason,) = made["not_because"]
    assert "override_linear_precision" in reason
    for fields in (
        {"override_linear_precision": [False, False, True]},
        {"scaling": "block", "backward_override": "high_precision"},
        {"scaling": "block", "backward_override": "dequantized"},
    ):
        made = plan(make_spec(llama_config, recipe={**te, **fields})).fusion
        assert (made["fused"], made["not_because"]) == (2, {})


def test_bf16_is_fused_on_a_gpu_and_the_loss_whatever_becomes_of_the_blocks(
    make_spec, llama_config
):
    def fusion(**recipe):
        return plan(make_spec(llama_config, recipe=recipe)).fusion

    assert fusion(engine="amp")["fused"] == 2
    fp16 = fusion(engine="amp", dtype="fp16")
    assert (fp16["fused"], fp16["loss"]) == (0, False)
    assert fp16["not_because"] == {"blocks are fused without FP8 in bf16 only, and this is fp16": 1}
    torchao = fusion(engine="torchao")
    assert (torchao["fused"], torchao["loss"]) == (0, True)
    on_cpu = plan(make_spec(llama_config, recipe={"engine": "amp"}, resources={"device": "cpu"}))
    assert (on_cpu.fusion["fused"], on_cpu.fusion["loss"]) == (0, False)
