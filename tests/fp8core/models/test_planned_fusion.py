"""What a plan says of fusion, beside what `fuse` does with the same model."""

from __future__ import annotations

import pytest
import torch

from fp8core.conversion import decide
from fp8core.conversion.shape_rules import shape_rules
from fp8core.fusion import PlannedAdapters, fuse
from fp8core.fusion.plain import PlainParts
from fp8core.models.adapter_targets import adapter_targets
from fp8core.models.planned_fusion import planned_fusion
from fp8core.spec import LoraAdapter
from tests.fp8core.fusion.berts import bert
from tests.fp8core.fusion.families import make

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
