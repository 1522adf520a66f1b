"""The conversion that a plan tells of against the real one."""

from __future__ import annotations

import pytest
import torch

from fp8core import engines
from fp8core.conversion import convert
from fp8core.models import load, plan


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
    assert (
        torchao.conversion["kept_because"][
            "torchao has no norms; torch.compile fuses the model's own"
        ]
        == 5
    )
    amp = plan(make_spec(llama_config, recipe={"engine": "amp"}))
    assert amp.conversion["converted"] == 0
    assert amp.flops.fp8_share == 0.0
    override = {"override_linear_precision": [False, False, True]}
    partly = plan(make_spec(llama_config, recipe=override)).flops.fp8_share
    whole = plan(make_spec(llama_config, recipe={})).flops.fp8_share
    assert partly == pytest.approx(whole * 2 / 3)
    all_three = plan(make_spec(llama_config, recipe={"override_linear_precision": [True] * 3}))
    reason = "override_linear_precision keeps all three GEMMs in high precision"
    assert all_three.conversion["kept_because"][reason] == 2 * 7
    assert all_three.flops.fp8_share == 0.0
    block = {"engine": "te", "scaling": "block", "backward_override": "high_precision"}
    assert plan(make_spec(llama_config, recipe=block)).flops.fp8_share == pytest.approx(whole / 3)
