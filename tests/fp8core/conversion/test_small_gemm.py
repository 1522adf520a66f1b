"""Layers that FP8 would slow down stay in bf16, by a table of a card that does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.conversion import SmallGemmRule, convert, small_gemm_rule
from fp8core.models import plan
from fp8core.spec import Conversion, JobSpec, parse_spec
from tests.fp8core.conversion.conftest import PlainEngine, PlainLinear
from tests.fp8core.fusion.families import make
from tests.fp8core.fusion.test_conversion import FusingEngine
from tests.fp8core.planted_measurements import (
    CARD,
    bf16_time,
    from_128_on,
    plant_layers,
    plant_models,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("fp8core.measured.tables.FOLDER", tmp_path)
    return tmp_path


def spec_of(config: dict[str, Any] | None = None, **parts: Any) -> JobSpec:
    spec = {
        "model": {"source": "config", "config": config or LLAMA},
        "data": {"source": "builtin"},
        "recipe": {"engine": "te"},
        "training": {"batch_size": 4, "sequence_length": 256},
    }
    return parse_spec({**spec, **parts})


def rule_of(**parts: Any) -> SmallGemmRule:
    rule = small_gemm_rule(spec_of(**parts), CARD)
    assert isinstance(rule, SmallGemmRule), rule
    return rule


def slower(kind: str, tokens: int, width: int, out: int) -> float:
    return 3.0 * bf16_time(kind, tokens, width, out)


def test_layer_by_layer_those_stay_that_fp8_slows_down(folder: Path) -> None:
    plant_layers(folder)
    made = plan(spec_of(conversion={"fuse": "none"}), card=CARD)
    rows = {row["name"]: row["reason"] for row in made.conversion["rows"]}  # type: ignore[attr-defined]
    kept = {name for name, reason in rows.items() if reason and "in FP8 and" in reason}
    # 128 to 32: twice the time; every other Linear has 128 or more on both sides.
    assert kept == {
        f"model.layers.{i}.self_attn.{part}" for i in range(2) for part in ("k_proj", "v_proj")
    }
    # 1024 tokens, 128 x 32: 4.19 microseconds, and twice that.
    assert rows["model.layers.0.self_attn.k_proj"] == (
        f"it takes 0.01 ms in FP8 and 0.00 ms in bf16, by times measured on {CARD} at 1024 tokens; "
        "conversion.small_gemm is auto"
    )
    assert made.small_gemm == {
        "applied": True,
        "card": CARD,
        "tokens": 1024,
        "judged": 14,
        "kept": 4,
        "says": "4 of 14 Linear layers are faster in bf16, by times measured on Planted Card 9000 "
        "at 1024 tokens, and stay in it",
    }


def test_a_block_that_is_fused_is_judged_as_a_whole(folder: Path) -> None:
    plant_layers(folder)
    made = plan(spec_of(), card=CARD)
    # Its queries, keys and values are one GEMM of 128 to 192.
    assert made.small_gemm["kept"] == 0
    assert made.fusion["fused"] == 2

    def but_for_mlps(kind: str, *size: int) -> float:
        return (1.2 if kind == "norm_mlp" else 0.9) * bf16_time(kind, *size)

    plant_layers(folder, but_for_mlps)
    made = plan(spec_of(), card=CARD)
    assert made.small_gemm["kept"] == 14, "an MLP loses more than the rest of a block gains"
    half = plan(spec_of(conversion={"skip": ["*.mlp.*"]}), card=CARD)
    assert half.small_gemm["kept"] == 0, "only what would be fused is counted"


def test_where_a_whole_model_gains_nothing_the_plan_says_so(folder: Path) -> None:
    plant_layers(folder, slower)
    made = plan(spec_of(), card=CARD)
    assert made.conversion["converted"] == 0, "norms stay too"
    assert made.fusion["fused"] == 0
    assert made.flops.fp8_share == 0.0
    assert made.small_gemm["says"] == (
        "FP8 would gain nothing: all 14 Linear layers are faster in bf16, by times measured on "
        f"{CARD} at 1024 tokens, and stay in it"
    )
    off = plan(spec_of(conversion={"small_gemm": "off"}), card=CARD)
    assert off.conversion["converted"] == 19
    assert off.small_gemm["says"] == (
        "the small-GEMM rule does not apply: conversion.small_gemm is off"
    )
    # A head that is asked for is in FP8, and with it the norms.
    head = plan(spec_of(conversion={"output_head": True}), card=CARD)
    assert head.conversion["converted"] == 2


@pytest.mark.parametrize(
    ("parts", "card", "because"),
    [
        ({}, None, "it is not known on which GPU the job runs"),
        ({}, "NVIDIA Abacus", f"no times were measured on NVIDIA Abacus (cards with times: {CARD}"),
        ({"recipe": {"engine": "emulated"}}, CARD, "of the engine te, and this is emulated"),
        ({"recipe": {"engine": "torchao"}}, CARD, "of the engine te, and this is torchao"),
        ({"recipe": {"engine": "amp"}}, CARD, "of the engine te, and this is amp"),
        (
            {"recipe": {"engine": "te", "override_linear_precision": [False, False, True]}},
            CARD,
            "no times were measured with override_linear_precision",
        ),
        (
            {"recipe": {"engine": "te", "scaling": "current"}},
            CARD,
            f"no times of current scaling were measured on {CARD}",
        ),
        ({"adapter": {"type": "lora"}}, CARD, "adapters go beside frozen ones"),
    ],
)
def test_without_figures_the_rule_does_nothing_and_says_so(
    folder: Path, parts: dict[str, Any], card: str | None, because: str
) -> None:
    plant_layers(folder, slower)
    found = small_gemm_rule(spec_of(**parts), card)
    assert isinstance(found, str)
    assert because in found
    made = plan(spec_of(**parts), card=card)
    assert made.small_gemm["applied"] is False
    assert because in str(made.small_gemm["says"])
    assert not any("small_gemm" in reason for reason in made.conversion["kept_because"])  # type: ignore[attr-defined]


def test_wider_layers_than_were_measured_are_converted(folder: Path) -> None:
    plant_layers(folder, slower)
    wide = {**LLAMA, "intermediate_size": 528}
    made = plan(spec_of(wide, conversion={"fuse": "none"}), card=CARD)
    rows = {row["name"]: row["reason"] for row in made.conversion["rows"]}  # type: ignore[attr-defined]
    assert rows["model.layers.0.mlp.up_proj"] is None
    assert rows["model.layers.0.self_attn.q_proj"] is not None
    assert plan(spec_of(wide), card=CARD).small_gemm["kept"] == 0, "nor is a block with one kept"


def test_conversion_keeps_what_the_plan_says(folder: Path) -> None:
    plant_layers(folder, slower)
    model = make("Llama")
    before = [type(module) for module in model.modules()]
    report = convert(model, FusingEngine(), Conversion(), small_gemms=rule_of())
    assert [type(module) for module in report.model.modules()] == before, "it is the plain model"
    assert report.converted == []
    assert report.fusion is not None
    assert report.fusion.blocks == []
    assert report.small_gemms is not None
    assert report.small_gemms.to_json()["kept"] == report.small_gemms.judged == 14
    assert "model.norm" in report.small_gemms.kept

    plant_layers(folder, from_128_on)
    model = make("Llama")
    report = convert(model, PlainEngine(), Conversion(), small_gemms=rule_of())
    kept = [row.name for row in report.kept if row.reason and "in FP8 and" in row.reason]
    narrow = [
        name
        for name, module in model.named_modules()
        if hasattr(module, "in_features")
        and min(module.in_features, module.out_features) < 128
        and name != "lm_head"
    ]
    assert sorted(kept) == sorted(name for name in narrow if _is_slower(model, name))
    assert kept, "the model has some"


def _is_slower(model: Any, name: str) -> bool:
    linear = model.get_submodule(name)
    rule = rule_of()
    fp8, bf16 = (
        rule.times.microseconds(
            "linear", column, rule.tokens, linear.in_features, linear.out_features
        )
        for column in ("delayed", "bf16")
    )
    assert fp8 is not None
    assert bf16 is not None
    return fp8 > bf16


def test_what_was_kept_when_the_job_began_is_kept_again(folder: Path) -> None:
    kept = {"model.layers.0.mlp.up_proj": "it was slower", "model.norm": "no Linear"}
    report = convert(make("Llama"), PlainEngine(), Conversion(), small_gemms=kept)
    assert {row.name: row.reason for row in report.kept if row.name != "lm_head"} == kept
    assert report.small_gemms is not None
    assert report.small_gemms.says == (
        "1 Linear layers stay in bf16, as they did when the job began"
    )
    up = report.model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(up, torch.nn.Linear)
    down = report.model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(down, PlainLinear)


def test_the_plan_quotes_the_measured_model_that_is_nearest(folder: Path) -> None:
    speeds = {"plain": 90, "fused": 150, "fused_head": 160, "octrain_bf16": 80, "bf16": 100}
    plant_models(folder, {300_000: speeds, 3_000_000: {"fused_head": 60, "bf16": 20}})
    [found] = plan(spec_of()).measured
    assert (found["card"], found["parameters"], found["row"]) == (CARD, 300_000, "fused")
    assert found["speed_up"] == 1.5
    assert str(found["says"]).startswith(f"measured on {CARD}: a model of 0.0003 billion")

    def row(**conversion: Any) -> Any:
        return plan(spec_of(conversion=conversion)).measured[0]["row"]

    assert row(output_head=True) == "fused_head"
    assert row(fuse="none") == "plain"
    larger = {**LLAMA, "num_hidden_layers": 20}
    [found] = plan(spec_of(larger), card=CARD).measured
    assert (found["row"], found["speed_up"]) == ("fused_head", 3.0), "fused was not measured there"
    assert plan(spec_of(larger, conversion={"fuse": "none"})).measured == []
    assert plan(spec_of(recipe={"engine": "emulated"})).measured == []
