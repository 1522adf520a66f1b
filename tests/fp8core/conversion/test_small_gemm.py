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


def test_all_linears_of_a_model_are_judged_together(folder: Path) -> None:
    plant_layers(folder)
    made = plan(spec_of(conversion={"fuse": "none"}), card=CARD)
    # Those of 32 features take twice the time in FP8, the others, which are more, half of it.
    assert made.small_gemm["kept"] == 0
    assert made.conversion["converted"] == 19
    per_layer = {"bf16": 2 * 128 * 32 + 2 * 128 * 128 + 3 * 128 * 256}
    per_layer["fp8"] = 4 * 128 * 32 + 128 * 128 + 3 * 128 * 128
    expected = {name: 2 * 1024 * size / 1e9 for name, size in per_layer.items()}
    assert made.small_gemm["milliseconds"] == {
        name: pytest.approx(time, abs=6e-4) for name, time in expected.items()
    }
    assert made.small_gemm["says"] == (
        "its 14 Linear layers take 0.17 ms in FP8 and 0.29 ms in bf16, by times measured on "
        "Planted Card 9000 at 1024 tokens"
    )


def test_a_block_that_is_fused_is_judged_in_its_fused_form(folder: Path) -> None:
    def but_for_mlps(kind: str, *size: int) -> float:
        return (1.3 if kind == "norm_mlp" else 0.9) * bf16_time(kind, *size)

    plant_layers(folder, but_for_mlps)
    made = plan(spec_of(), card=CARD)
    assert made.small_gemm["kept"] == 14, "an MLP loses more than the rest of a block gains"
    # 128 to 192 (query, key and value), 128 to 128, and an MLP of 256.
    sizes = (128 * 192 + 128 * 128, 128 * 256)
    bf16, fp8 = 2048 * sum(sizes) / 1e9, 2048 * (0.9 * sizes[0] + 1.3 * sizes[1]) / 1e9
    assert made.small_gemm["milliseconds"] == {
        "fp8": pytest.approx(fp8, abs=6e-4),
        "bf16": pytest.approx(bf16, abs=6e-4),
    }
    assert plan(spec_of(conversion={"fuse": "none"}), card=CARD).small_gemm["kept"] == 0
    half = plan(spec_of(conversion={"skip": ["*.mlp.*"]}), card=CARD)
    assert half.small_gemm["kept"] == 0, "only what would be converted is counted"


def test_a_job_whose_steps_may_be_replayed_is_judged_without_the_host(folder: Path) -> None:
    def replayed(kind: str, *size: int) -> float:
        return 0.08 * bf16_time(kind, *size)

    plant_layers(folder, slower, graphed=replayed)
    made = plan(spec_of(), card=CARD)
    assert made.small_gemm["kept"] == 0
    sizes = 128 * 192 + 128 * 128 + 128 * 256
    assert made.small_gemm["milliseconds"] == {
        "fp8": pytest.approx(2048 * 0.08 * sizes / 1e9, abs=6e-4),
        "bf16": pytest.approx(2048 * 0.1 * sizes / 1e9, abs=6e-4),
    }
    assert str(made.small_gemm["says"]).endswith("in steps replayed as CUDA graphs")
    training = {"batch_size": 4, "sequence_length": 256}
    for parts in (
        {"training": {**training, "cuda_graphs": "off"}},
        {"training": {**training, "gradient_accumulation": 2}},
        # Nothing of a block but its attention is fused, and so there is no graph.
        {"conversion": {"only": ["*.self_attn.*"]}},
        {"conversion": {"skip": ["*.mlp.*"]}},
        {"conversion": {"skip": ["model.layers.0.mlp.*"]}},
        {"conversion": {"fuse": "none"}},
    ):
        told = plan(spec_of(**parts), card=CARD).small_gemm
        assert told["kept"] == told["judged"] > 0, parts
        assert "CUDA graphs" not in str(told["says"])


def test_where_replayed_steps_were_not_measured_a_job_that_may_have_them_is_in_fp8(
    folder: Path,
) -> None:
    """Times that contain the host's say nothing of it."""
    plant_layers(folder, slower, graphed=slower, graphed_kinds=("norm_mlp",))
    told = plan(spec_of(), card=CARD).small_gemm
    assert (told["kept"], told["judged"]) == (0, 0)
    assert "no times of replayed steps were measured" in str(told["says"])
    training = {"batch_size": 4, "sequence_length": 256, "cuda_graphs": "off"}
    without = plan(spec_of(training=training), card=CARD).small_gemm
    assert without["kept"] == without["judged"] > 0


def test_where_a_whole_model_gains_nothing_the_plan_says_so(folder: Path) -> None:
    plant_layers(folder, slower)
    made = plan(spec_of(), card=CARD)
    assert made.conversion["converted"] == 0, "norms stay too"
    assert made.fusion["fused"] == 2, "in bf16"
    assert made.flops.fp8_share == 0.0
    says = str(made.small_gemm["says"])
    assert says.startswith("FP8 would gain nothing, and the model stays in bf16: its 14 Linear")
    assert made.small_gemm["applied"] is True
    assert (made.small_gemm["kept"], made.small_gemm["judged"]) == (14, 14)
    assert (made.small_gemm["card"], made.small_gemm["tokens"]) == (CARD, 1024)
    [reason] = [why for why in made.conversion["kept_because"] if "small_gemm" in why]  # type: ignore[attr-defined]
    assert reason == (
        "conversion.small_gemm is auto, and FP8 would slow the model down: "
        + says.partition(": ")[2]
    )
    off = plan(spec_of(conversion={"small_gemm": "off"}), card=CARD)
    assert off.conversion["converted"] == 19
    assert off.small_gemm["says"] == (
        "the small-GEMM rule does not apply: conversion.small_gemm is off"
    )
    # A head that is asked for is in FP8.
    head = plan(spec_of(conversion={"output_head": True}), card=CARD)
    assert head.conversion["converted"] == 1
    none = plan(spec_of(conversion={"linear": False}), card=CARD)
    assert "no Linear layer would be converted" in str(none.small_gemm["says"])


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


@pytest.mark.parametrize("fuse", ["auto", "none"])
def test_of_wider_layers_than_were_measured_nothing_is_known(folder: Path, fuse: str) -> None:
    plant_layers(folder, slower)
    made = plan(spec_of({**LLAMA, "intermediate_size": 528}, conversion={"fuse": fuse}), card=CARD)
    assert made.conversion["converted"] == 19
    assert made.small_gemm["says"] == (
        "the small-GEMM rule does not apply: no times were measured on Planted Card 9000 of layers "
        "of 128 to 528"
    )


def test_conversion_keeps_what_the_plan_says(folder: Path) -> None:
    plant_layers(folder, slower)
    model = make("Llama")
    before = [type(module) for module in model.modules()]
    report = convert(model, FusingEngine(), Conversion(), small_gemms=rule_of())
    assert [type(module) for module in report.model.modules()] == before, "it is the plain model"
    assert report.converted == []
    assert report.fusion is None
    (blocks,) = report.others
    assert blocks.reason == "blocks are fused without FP8 on CUDA devices only"
    assert report.small_gemms is not None
    assert report.small_gemms.to_json()["kept"] == report.small_gemms.judged == 14
    assert "model.norm" in report.small_gemms.kept

    plant_layers(folder, lambda kind, *size: 0.9 * bf16_time(kind, *size))
    report = convert(make("Llama"), FusingEngine(), Conversion(), small_gemms=rule_of())
    assert [row.name for row in report.kept] == ["lm_head"]
    assert report.small_gemms is not None
    assert report.small_gemms.kept == {}


def test_what_was_kept_when_the_job_began_is_kept_again(folder: Path) -> None:
    kept = {"model.layers.0.mlp.up_proj": "it was slower", "model.norm": "no Linear"}
    report = convert(make("Llama"), PlainEngine(), Conversion(), small_gemms=kept)
    assert {row.name: row.reason for row in report.kept if row.name != "lm_head"} == kept
    assert report.small_gemms is not None
    assert report.small_gemms.says == (
        "1 Linear layers stay in bf16, as they did when the job began"
    )
    began = convert(make("Llama"), PlainEngine(), Conversion(), small_gemms={}).small_gemms
    assert began is not None
    assert began.says == ("the small-GEMM rule does not apply: it kept no layer when the job began")
    up = report.model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(up, torch.nn.Linear)
    down = report.model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(down, PlainLinear)


def test_the_plan_quotes_the_measured_model_that_is_nearest(folder: Path) -> None:
    speeds = {"plain": 90, "fused": 150, "fused_head": 160, "octrain_bf16": 80, "bf16": 100}
    speeds["fused_fp8_attention"] = 170
    plant_models(folder, {300_000: speeds, 3_000_000: {"fused_head": 60, "octrain_bf16_plain": 20}})
    [found] = plan(spec_of()).measured
    assert (found["card"], found["parameters"], found["row"]) == (CARD, 300_000, "fused")
    assert found["speed_up"] == 1.5
    assert str(found["says"]).startswith(f"measured on {CARD}: a model of 0.0003 billion")
    assert "in FP8 (blocks fused) as in bf16 (blocks fused too)" in str(found["says"])

    def row(recipe: dict[str, Any] | None = None, **conversion: Any) -> Any:
        fields = {"conversion": conversion} | ({} if recipe is None else {"recipe": recipe})
        return plan(spec_of(**fields)).measured[0]["row"]

    assert row(output_head=True) == "fused_head"
    attention = {"engine": "te", "fp8_dpa": True}
    assert row(attention, output_head=True) == "fused_fp8_attention"
    assert row(attention) == "fused", "its head is not in FP8"
    assert row(fuse="none") == "plain"
    [found] = plan(spec_of(conversion={"fuse": "none"})).measured
    assert found["speed_up"] == 0.9
    assert "in FP8 (layer by layer) as in bf16 (layer by layer too)" in str(found["says"])
    larger = {**LLAMA, "num_hidden_layers": 20}
    [found] = plan(spec_of(larger), card=CARD).measured
    assert (found["row"], found["speed_up"]) == ("fused_head", 3.0), "fused was not measured there"
    assert "as in bf16 (its blocks not fused)" in str(found["says"])
    assert plan(spec_of(larger, conversion={"fuse": "none"})).measured == []
    assert plan(spec_of(recipe={"engine": "emulated"})).measured == []


def test_what_is_not_fused_is_compared_with_what_is_not(folder: Path) -> None:
    """Else FP8 would be called slower for a model that no fusion makes faster in bf16 either."""
    plant_models(folder, {300_000: {"plain": 130, "octrain_bf16": 200, "octrain_bf16_plain": 100}})
    [found] = plan(spec_of(conversion={"fuse": "none"})).measured
    assert found["speed_up"] == 1.3
    assert "in FP8 (layer by layer) as in bf16 (layer by layer too)" in str(found["says"])
    plant_models(folder, {300_000: {"plain": 130, "octrain_bf16": 200}})
    [found] = plan(spec_of(conversion={"fuse": "none"})).measured
    assert found["speed_up"] == 0.65
    assert "in FP8 (layer by layer) as in bf16 (blocks fused)," in str(found["says"])
    plant_models(folder, {300_000: {"plain": 130, "bf16": 125, "octrain_bf16_plain": 100}})
    [found] = plan(spec_of(conversion={"fuse": "none"})).measured
    assert found["speed_up"] == 1.3, "a peer stands in only for what was not measured"


def test_a_speed_of_delayed_scaling_is_not_one_of_another(folder: Path) -> None:
    plant_models(folder, {300_000: {"fused": 150, "octrain_bf16": 100}})

    def says(**recipe: Any) -> str:
        return str(plan(spec_of(recipe={"engine": "te", **recipe})).measured[0]["says"])

    assert "scaling" not in says()
    assert says(scaling="current").endswith(
        "; measured with delayed scaling, while this job's is current"
    )


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize(
    "recipe",
    [
        {"override_linear_precision": [False, False, True]},
        {"scaling": "block", "backward_override": "high_precision"},
    ],
)
def test_a_speed_of_all_gemms_in_fp8_is_not_one_of_some(
    folder: Path, recipe: dict[str, Any], fuse: str
) -> None:
    plant_models(folder, {300_000: {"plain": 90, "fused": 150, "octrain_bf16": 100}})
    [found] = plan(spec_of(recipe={"engine": "te", **recipe}, conversion={"fuse": fuse})).measured
    name = next(key for key in recipe if key != "scaling")
    assert str(found["says"]).endswith(
        f"; measured with all their GEMMs in FP8, while this job has {name}"
    )


def test_a_speed_of_replayed_steps_is_not_one_of_others(folder: Path) -> None:
    plant_models(folder, {300_000: {"fused": 150, "octrain_bf16": 100}}, graphed=["fused"])
    on = {"resources": {"device": "cuda"}}

    def says(**fields: Any) -> str:
        [found] = plan(spec_of(**on, **fields)).measured
        assert found["speed_up"] == 1.5
        return str(found["says"])

    assert "CUDA graphs" not in says()
    off = says(training={"cuda_graphs": "off"})
    assert off.endswith(
        "; its steps were replayed as CUDA graphs, and FP8 gains less, if anything, where they are "
        "not, as here: training.cuda_graphs is off"
    )
    plant_models(folder, {300_000: {"fused": 150, "octrain_bf16": 100}})
    assert "CUDA graphs" not in says(training={"cuda_graphs": "off"})
