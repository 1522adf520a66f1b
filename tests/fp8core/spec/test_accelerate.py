"""Every spelling of Hugging Face Accelerate 1.15: honoured, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fp8core.spec import Problem, parse_spec

Spec = Callable[..., dict[str, Any]]
Refused = Callable[[Any], dict[str, Problem]]

CANONICAL = {
    "engine": "te",
    "scaling": "delayed",
    "margin": 2,
    "interval": 3,
    "fp8_format": "E4M3",
    "amax_history_len": 16,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": [False, False, True],
    "use_autocast_during_eval": True,
    "fp8_dpa": False,
}
# TERecipeKwargs(...), field by field.
_OURS = ("engine", "scaling", "fp8_dpa")
TE_KWARGS = {key: value for key, value in CANONICAL.items() if key not in _OURS}
# The block that `accelerate config` writes.
CONFIG_BLOCK = {
    "backend": "TE",
    "use_autocast_during_eval": True,
    "margin": 2,
    "interval": 3,
    "fp8_format": "E4M3",
    "amax_history_length": 16,
    "amax_compute_algorithm": "most_recent",
    "override_linear_precision": [False, False, True],
}
# The options of `accelerate launch`, without the dashes.
LAUNCH_OPTIONS = {
    "fp8_backend": "te",
    "fp8_use_autocast_during_eval": True,
    "fp8_margin": 2,
    "fp8_interval": 3,
    "fp8_format": "e4m3",
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "MOST_RECENT",
    "fp8_override_linear_precision": "false,False,true",
}

DELAYED_SPELLINGS: list[dict[str, Any]] = [
    CANONICAL,
    TE_KWARGS,
    {**TE_KWARGS, "use_mxfp8_block_scaling": False},
    CONFIG_BLOCK,
    {"fp8_config": CONFIG_BLOCK},
    {"mixed_precision": "fp8", "fp8_config": CONFIG_BLOCK},
    {"backend": "te", "fp8_config": TE_KWARGS},
    LAUNCH_OPTIONS,
    {"fp8_config": LAUNCH_OPTIONS},
    {**TE_KWARGS, "override_linear_precision": "(False, False, True)"},
    {**TE_KWARGS, "override_linear_precision": (False, False, True)},
    {**CANONICAL, "engine": "TE"},
    {"engine": "te", **CONFIG_BLOCK},
]


@pytest.mark.parametrize("recipe", DELAYED_SPELLINGS)
def test_all_spellings_of_delayed_scaling_are_one_recipe(
    spec: Spec, recipe: dict[str, Any]
) -> None:
    assert parse_spec(spec(recipe=recipe)).resolved()["recipe"] == CANONICAL


def test_the_spellings_serve_the_emulated_engine_too(spec: Spec) -> None:
    block = {key: value for key, value in CONFIG_BLOCK.items() if key != "backend"}
    parsed = parse_spec(spec(recipe={"engine": "emulated", "fp8_config": block}))
    emulated = {key: value for key, value in CANONICAL.items() if key != "fp8_dpa"}
    assert parsed.resolved()["recipe"] == {**emulated, "engine": "emulated"}


def test_mxfp8_block_scaling(spec: Spec) -> None:
    expected = parse_spec(spec(recipe={"engine": "te", "scaling": "mxfp8"})).recipe
    neutral = {"margin": 0, "interval": 1, "override_linear_precision": [False, False, False]}
    for recipe in (
        {"use_mxfp8_block_scaling": True},
        {"use_mxfp8_block_scaling": True, "fp8_format": "e4m3", **neutral},
        {"fp8_config": {"backend": "TE", "use_mxfp8_block_scaling": True}},
        {"scaling": "mxfp8", "use_mxfp8_block_scaling": True},
    ):
        assert parse_spec(spec(recipe=recipe)).recipe == expected


def test_torchao(spec: Spec) -> None:
    for recipe in (
        {"backend": "AO", "enable_fsdp_float8_all_gather": False},
        {"fp8_config": {"backend": "ao"}},
        {"engine": "torchao", "config": None, "module_filter_func": None},
    ):
        parsed = parse_spec(spec(recipe=recipe))
        assert parsed.resolved()["recipe"] == {"engine": "torchao", "scaling": "tensorwise"}


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"backend": "MSAMP"}, "/recipe/backend", "MS-AMP"),
    ({"fp8_config": {"backend": "msamp"}}, "/recipe/fp8_config/backend", "MS-AMP"),
    ({"opt_level": "O2"}, "/recipe/opt_level", "MS-AMP"),
    ({"optimization_level": "O1"}, "/recipe/optimization_level", "MS-AMP"),
    ({"backend": "NVIDIA", "margin": 1}, "/recipe/backend", '"TE" or "AO"'),
    ({"backend": 3}, "/recipe/backend", "the number 3"),
    ({"engine": "te", "backend": "AO"}, "/recipe/backend", "contradicts"),
    ({"mixed_precision": "bf16"}, "/recipe/mixed_precision", '"engine": "amp"'),
    ({"use_mxfp8_block_scaling": "yes"}, "/recipe/use_mxfp8_block_scaling", "true or false"),
    (
        {"engine": "emulated", "use_mxfp8_block_scaling": True},
        "/recipe/use_mxfp8_block_scaling",
        "Transformer Engine",
    ),
    (
        {"scaling": "block", "use_mxfp8_block_scaling": True},
        "/recipe/use_mxfp8_block_scaling",
        "contradicts",
    ),
    (
        {"use_mxfp8_block_scaling": True, "amax_history_len": 16},
        "/recipe/amax_history_len",
        "delayed scaling",
    ),
    ({"use_mxfp8_block_scaling": True, "margin": 1}, "/recipe/margin", "delayed scaling"),
    (
        {"backend": "AO", "enable_fsdp_float8_all_gather": True},
        "/recipe/enable_fsdp_float8_all_gather",
        "FSDP2",
    ),
    ({"enable_fsdp_float8_all_gather": True}, "/recipe/enable_fsdp_float8_all_gather", "torchao"),
    ({"engine": "torchao", "pad_inner_dim": False}, "/recipe/pad_inner_dim", "no effect"),
    (
        {"fp8_config": {"backend": "AO", "fp8_pad_inner_dim": True}},
        "/recipe/fp8_config/fp8_pad_inner_dim",
        "no effect: torchao pads only the summed dimension",
    ),
    ({"pad_inner_dim": True}, "/recipe/pad_inner_dim", "torchao"),
    ({"backend": "AO", "config": {"emulate": True}}, "/recipe/config", "fields of the recipe"),
    ({"backend": "AO", "module_filter_func": "f"}, "/recipe/module_filter_func", "conversion.skip"),
    ({"amax_history_length": 0}, "/recipe/amax_history_length", "at least 1"),
    (
        {"fp8_config": {"amax_history_length": 0}},
        "/recipe/fp8_config/amax_history_length",
        "at least 1",
    ),
    ({"fp8_config": {"fp8_margin": -1}}, "/recipe/fp8_config/fp8_margin", "at least 0"),
    ({"fp8_config": {"amax_hist": 1}}, "/recipe/fp8_config/amax_hist", "amax_history_len"),
    ({"fp8_config": 8}, "/recipe/fp8_config", "must be an object, not the number 8"),
    ({"fp8_config": {"fp8_config": {}}}, "/recipe/fp8_config/fp8_config", "unknown key"),
    (
        {"amax_history_len": 4, "amax_history_length": 4},
        "/recipe/amax_history_length",
        'same setting as "amax_history_len"',
    ),
    (
        {"margin": 1, "fp8_config": {"margin": 1}},
        "/recipe/fp8_config/margin",
        'same setting as "margin"',
    ),
    ({"override_linear_precision": "true,false"}, "/recipe/override_linear_precision", "three"),
    ({"override_linear_precision": "a,b,c"}, "/recipe/override_linear_precision", "three"),
    ({"override_linear_precision": True}, "/recipe/override_linear_precision", "three"),
]


@pytest.mark.parametrize(("recipe", "pointer", "words"), REFUSALS)
def test_what_cannot_be_honoured_is_refused(
    spec: Spec, refused: Refused, recipe: dict[str, Any], pointer: str, words: str
) -> None:
    problems = refused(spec(recipe=recipe))
    assert list(problems) == [pointer]
    assert words in problems[pointer].message


@pytest.mark.parametrize("key", ["margin", "interval", "amax_history_len", "amax_compute_algo"])
def test_torchao_has_no_delayed_scaling(spec: Spec, refused: Refused, key: str) -> None:
    value = CANONICAL[key]
    problems = refused(spec(recipe={"engine": "torchao", key: value}))
    assert problems[f"/recipe/{key}"].code == "unsupported"
    assert "torchao has no delayed scaling" in problems[f"/recipe/{key}"].message


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("fp8_format", "scaling fixes the formats"),
        ("override_linear_precision", "rowwise_with_gw_hp"),
        ("use_autocast_during_eval", "no such switch"),
    ],
)
def test_other_settings_of_transformer_engine_on_torchao(
    spec: Spec, refused: Refused, key: str, words: str
) -> None:
    problems = refused(spec(recipe={"backend": "AO", key: CANONICAL[key]}))
    assert words in problems[f"/recipe/{key}"].message


def test_a_setting_of_another_recipe_names_it(spec: Spec, refused: Refused) -> None:
    problems = refused(spec(recipe={"engine": "amp", "fp8_format": "HYBRID", "margin": 1}))
    assert "amp runs without FP8" in problems["/recipe/margin"].message
    assert "te delayed scaling" in problems["/recipe/fp8_format"].message
    problems = refused(spec(recipe={"dtype": "bf16", "reduce_amax": True}))
    assert "belongs to amp" in problems["/recipe/dtype"].message
    assert "not offered here" in problems["/recipe/reduce_amax"].message


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"scaling": "block", "fp8_dpa": True}, "no FP8 attention under block scaling"),
        ({"scaling": "nvfp4", "fp8_dpa": True}, "no FP8 attention under nvfp4 scaling"),
        ({"engine": "emulated", "fp8_dpa": True}, "belongs to te delayed scaling and te current"),
        ({"engine": "torchao", "fp8_dpa": True}, "belongs to te delayed scaling"),
        ({"engine": "amp", "fp8_dpa": True}, "belongs to te delayed scaling"),
    ],
)
def test_fp8_attention_is_refused_where_nothing_computes_it(
    recipe: dict[str, Any], said: str, spec: Spec, refused: Refused
) -> None:
    assert said in refused(spec(recipe=recipe))["/recipe/fp8_dpa"].message


def test_fp8_multi_head_attention_is_refused_with_what_there_is(
    spec: Spec, refused: Refused
) -> None:
    problems = refused(spec(recipe={"fp8_mha": True}))
    assert "fp8_dpa computes attention in FP8" in problems["/recipe/fp8_mha"].message
