"""Every kind of faulty value: its place, its code, and words for a person."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from fp8core.spec import Problem, SpecInvalid, parse_spec

Spec = Callable[..., dict[str, Any]]
Refused = Callable[[Any], dict[str, Problem]]

CASES: list[tuple[dict[str, Any], str, str, str]] = [
    # sections, pointer, code, part of the message
    ({"recipe": {"amax_hist_len": 16}}, "/recipe/amax_hist_len", "unknown_key", "amax_history_len"),
    ({"recipe": {"fp8_format": "E5M2"}}, "/recipe/fp8_format", "unsupported", "E5M2 alone"),
    ({"recipe": {"fp8_format": "e5m2"}}, "/recipe/fp8_format", "unsupported", "HYBRID"),
    ({"recipe": {"fp8_format": "FP4"}}, "/recipe/fp8_format", "not_one_of", '"HYBRID", "E4M3"'),
    ({"recipe": {"amax_history_len": 0}}, "/recipe/amax_history_len", "out_of_range", "at least 1"),
    ({"recipe": {"amax_history_len": "16"}}, "/recipe/amax_history_len", "wrong_type", '"16"'),
    ({"recipe": {"amax_history_len": True}}, "/recipe/amax_history_len", "wrong_type", "true"),
    ({"recipe": {"margin": -1}}, "/recipe/margin", "out_of_range", "at least 0, not -1"),
    ({"recipe": {"margin": 2.5}}, "/recipe/margin", "wrong_type", "whole number"),
    ({"recipe": {"margin": 2.0}}, "/recipe/margin", "wrong_type", "whole number"),
    ({"recipe": {"interval": 0}}, "/recipe/interval", "out_of_range", "at least 1"),
    ({"recipe": {"amax_compute_algo": "mean"}}, "/recipe/amax_compute_algo", "not_one_of", '"max"'),
    (
        {"recipe": {"override_linear_precision": [True, False]}},
        "/recipe/override_linear_precision",
        "wrong_type",
        "[fprop, dgrad, wgrad], not [true, false]",
    ),
    (
        {"recipe": {"override_linear_precision": [0, 0, 1]}},
        "/recipe/override_linear_precision",
        "wrong_type",
        "three booleans",
    ),
    (
        {"recipe": {"use_autocast_during_eval": "yes"}},
        "/recipe/use_autocast_during_eval",
        "wrong_type",
        'true or false, not the text "yes"',
    ),
    ({"recipe": {"engine": "emulate"}}, "/recipe/engine", "not_one_of", 'mean "emulated"'),
    ({"recipe": {"engine": None}}, "/recipe/engine", "not_one_of", "not null"),
    ({"recipe": {"engine": ["te"]}}, "/recipe/engine", "not_one_of", "a list of 1"),
    ({"recipe": {"scaling": "delay"}}, "/recipe/scaling", "not_one_of", 'mean "delayed"'),
    (
        {"recipe": {"engine": "emulated", "scaling": "block"}},
        "/recipe/scaling",
        "not_one_of",
        'one of "delayed", "current"',
    ),
    ({"recipe": {"engine": "torchao", "scaling": "row"}}, "/recipe/scaling", "not_one_of", "row"),
    ({"recipe": []}, "/recipe", "wrong_type", "an object, not an empty list"),
    ({"recipe": None}, "/recipe", "wrong_type", "not null"),
    (
        {"recipe": {"engine": "te", "scaling": "block", "x_block_scaling_dim": 3}},
        "/recipe/x_block_scaling_dim",
        "not_one_of",
        "one of 1, 2, not the number 3",
    ),
    (
        {"recipe": {"engine": "amp", "dtype": "bf61"}},
        "/recipe/dtype",
        "not_one_of",
        'mean "bf16"',
    ),
    ({"model": {"source": "pth", "path": "x"}}, "/model/source", "not_one_of", 'mean "path"'),
    ({"model": {"path": "x"}}, "/model/source", "missing", '"huggingface", "path"'),
    ({"model": {"source": "path"}}, "/model/path", "missing", "required"),
    ({"model": {"source": "path", "path": ""}}, "/model/path", "too_short", "1 character"),
    ({"model": {"source": "path", "path": "x" * 4097}}, "/model/path", "too_long", "4096"),
    (
        {"model": {"source": "huggingface", "id": "../secret"}},
        "/model/id",
        "bad_format",
        "owner/name",
    ),
    (
        {"model": {"source": "huggingface", "id": "a/b", "revision": "a b"}},
        "/model/revision",
        "bad_format",
        "branch, tag or commit",
    ),
    ({"model": {"source": "config", "config": {}}}, "/model/config/model_type", "missing", "llama"),
    (
        {"model": {"source": "config", "config": {"model_type": "x", "auto_map": {"A": "b.C"}}}},
        "/model/config/auto_map",
        "unsupported",
        "not run",
    ),
    ({"model": {"source": "job", "job": "17"}}, "/model/job", "bad_format", "job_"),
    (
        {"model": {"source": "job", "job": "job_1", "checkpoint": "newest"}},
        "/model/checkpoint",
        "wrong_type",
        '"best", "last" or the step',
    ),
    (
        {"model": {"source": "job", "job": "job_1", "checkpoint": True}},
        "/model/checkpoint",
        "wrong_type",
        "not true",
    ),
    *(
        (
            {"model": {"source": "config", "config": {"model_type": "llama", **sizes}}},
            at,
            code,
            words,
        )
        for sizes, at, code, words in (
            (
                {"num_hidden_layers": 10**9},
                "/model/config/num_hidden_layers",
                "out_of_range",
                "from 1 to 10000",
            ),
            ({"hidden_size": 10**11}, "/model/config/hidden_size", "out_of_range", "1048576"),
            ({"n_embd": 0}, "/model/config/n_embd", "out_of_range", "not 0"),
            ({"vocab_size": 1e3}, "/model/config/vocab_size", "wrong_type", "a whole number"),
            (
                {"text_config": {"max_position_embeddings": 10**12}},
                "/model/config/text_config/max_position_embeddings",
                "out_of_range",
                "268435456",
            ),
            (
                {"hidden_size": 2**20, "num_hidden_layers": 9999},
                "/model/config",
                "out_of_range",
                "weights",
            ),
        )
    ),
    ({"tokenizer": "words"}, "/tokenizer", "wrong_type", "an object"),
    (
        {"tokenizer": {"source": "train", "vocab_size": 255}},
        "/tokenizer/vocab_size",
        "out_of_range",
        "at least 260",
    ),
    ({"data": {"source": "csv", "path": "x"}}, "/data/source", "not_one_of", '"jsonl"'),
    (
        {"data": {"source": "builtin", "name": "python"}},
        "/data/name",
        "not_one_of",
        "python_topics",
    ),
    (
        {"data": {"source": "huggingface", "id": "a/b", "split": "train[:10%]"}},
        "/data/split",
        "bad_format",
        "name of a split",
    ),
    (
        {"data": {"source": "jsonl", "path": "x", "columns": {"txt": "body"}}},
        "/data/columns/txt",
        "unknown_key",
        '"text"',
    ),
    ({"training": {"steps": 0}}, "/training/steps", "out_of_range", "at least 1"),
    ({"training": {"steps": 2**31}}, "/training/steps", "out_of_range", "at most"),
    ({"training": {"steps": 10**30}}, "/training/steps", "out_of_range", "too large"),
    (
        {"training": {"optimizer": {"lr": math.nan}}},
        "/training/optimizer/lr",
        "not_finite",
        "NaN",
    ),
    (
        {"training": {"optimizer": {"lr": math.inf}}},
        "/training/optimizer/lr",
        "not_finite",
        "Infinity",
    ),
    (
        {"training": {"optimizer": {"lr": 0}}},
        "/training/optimizer/lr",
        "out_of_range",
        "greater than 0",
    ),
    (
        {"training": {"optimizer": {"lr": "1e-3"}}},
        "/training/optimizer/lr",
        "wrong_type",
        'a number, not the text "1e-3"',
    ),
    (
        {"training": {"optimizer": {"lr": False}}},
        "/training/optimizer/lr",
        "wrong_type",
        "not false",
    ),
    (
        {"training": {"optimizer": {"betas": [0.9]}}},
        "/training/optimizer/betas",
        "wrong_type",
        "two numbers",
    ),
    (
        {"training": {"optimizer": {"betas": [0.9, 1.0]}}},
        "/training/optimizer/betas",
        "wrong_type",
        "below 1",
    ),
    (
        {"training": {"optimizer": {"name": "adam"}}},
        "/training/optimizer/name",
        "not_one_of",
        'must be "adamw"',
    ),
    (
        {"training": {"schedule": {"name": "cosin"}}},
        "/training/schedule/name",
        "not_one_of",
        'mean "cosine"',
    ),
    (
        {"training": {"schedule": {"name": "warmup_stable_decay"}}},
        "/training/schedule/decay_steps",
        "missing",
        "steps of the decay",
    ),
    ({"training": {"precision": "fast"}}, "/training/precision", "wrong_type", "object"),
    (
        {"training": {"precision": {"weights": "fp16"}}},
        "/training/precision/weights",
        "not_one_of",
        '"bf16"',
    ),
    (
        {"training": {"mask_probability": 1}},
        "/training/mask_probability",
        "out_of_range",
        "below 1",
    ),
    (
        {"training": {"on_divergence": {"action": "skip"}}},
        "/training/on_divergence/action",
        "not_one_of",
        '"skip_step"',
    ),
    ({"training": {"on_divergence": "skip"}}, "/training/on_divergence", "wrong_type", "object"),
    ({"training": {"parity": {}}}, "/training/parity/steps", "missing", "steps of the reference"),
    (
        {"training": {"parity": {"steps": 5, "bound": 0}}},
        "/training/parity/bound",
        "out_of_range",
        "0",
    ),
    ({"adapter": {"rank": 0}}, "/adapter/rank", "out_of_range", "at least 1"),
    ({"adapter": {"target_modules": []}}, "/adapter/target_modules", "wrong_type", '"linear" or'),
    ({"adapter": {"target_modules": "all"}}, "/adapter/target_modules", "wrong_type", "glob"),
    ({"adapter": {"target_modules": ["q", 3]}}, "/adapter/target_modules", "wrong_type", "glob"),
    ({"adapter": {"type": "dora"}}, "/adapter/type", "not_one_of", "lora"),
    ({"evaluation": {"fraction": 1}}, "/evaluation/fraction", "out_of_range", "below 1"),
    ({"evaluation": {"max_batches": 0}}, "/evaluation/max_batches", "out_of_range", "at least 1"),
    ({"checkpoint": {"keep_last": 0}}, "/checkpoint/keep_last", "out_of_range", "at least 1"),
    ({"conversion": {"only": []}}, "/conversion/only", "too_short", "at least 1 item"),
    ({"conversion": {"skip": "lm_head"}}, "/conversion/skip", "wrong_type", "a list"),
    ({"conversion": {"skip": ["a", 3]}}, "/conversion/skip/1", "wrong_type", "text"),
    ({"conversion": {"skip": ["*"] * 1001}}, "/conversion/skip", "too_long", "1000 items"),
    ({"limits": {"lease_ttl_seconds": 29}}, "/limits/lease_ttl_seconds", "out_of_range", "30"),
    ({"limits": {"max_restarts": 101}}, "/limits/max_restarts", "out_of_range", "100"),
    ({"limits": {"max_run_time_seconds": 0}}, "/limits/max_run_time_seconds", "out_of_range", "1"),
    ({"limits": {"on_stall": "stop"}}, "/limits/on_stall", "not_one_of", '"restart"'),
    ({"resources": {"device": "gpu"}}, "/resources/device", "not_one_of", '"cuda"'),
    ({"spec_version": 2}, "/spec_version", "not_one_of", "must be 1"),
    ({"priority": 101}, "/priority", "out_of_range", "at most 100"),
    ({"name": "x" * 201}, "/name", "too_long", "200 characters"),
    ({"notes": "x" * 4097}, "/notes", "too_long", "4096"),
    ({"labels": {"a b": "c"}}, "/labels/a b", "bad_format", "letters, digits"),
    ({"labels": {"a/b": 1}}, "/labels/a~1b", "wrong_type", "text"),
    ({"labels": {"a": "x" * 257}}, "/labels/a", "too_long", "256"),
    ({"labels": {f"k{i}": "" for i in range(33)}}, "/labels", "too_long", "32 items"),
    ({"labels": ["a"]}, "/labels", "wrong_type", "an object"),
    ({"task": "causal"}, "/task", "not_one_of", 'mean "causal_lm"'),
    ({"taks": "causal_lm"}, "/taks", "unknown_key", '"task"'),
    ({"xyzzy": 1}, "/xyzzy", "unknown_key", "known here: spec_version, name"),
    ({"lr": 1e-3}, "/lr", "unknown_key", "/training/optimizer/lr"),
    ({"training": {"lr": 1e-3}}, "/training/lr", "unknown_key", "/training/optimizer/lr"),
    ({"max_steps": 3}, "/max_steps", "unknown_key", "known here"),
]


@pytest.mark.parametrize(("sections", "pointer", "code", "words"), CASES)
def test_a_fault_is_told_at_its_place(
    spec: Spec, refused: Refused, sections: dict[str, Any], pointer: str, code: str, words: str
) -> None:
    problems = refused(spec(**sections))
    assert list(problems) == [pointer]
    assert problems[pointer].code == code
    assert words in problems[pointer].message


@pytest.mark.parametrize("section", ["model", "data", "recipe"])
def test_what_is_required(spec: Spec, refused: Refused, section: str) -> None:
    document = spec()
    del document[section]
    problems = refused(document)
    assert list(problems) == [f"/{section}"]
    assert problems[f"/{section}"].code == "missing"


def test_all_faults_are_told_at_once(spec: Spec, refused: Refused) -> None:
    document = spec(
        recipe={"amax_hist_len": 3, "fp8_format": "E5M2", "margin": -1},
        training={
            "steps": 0,
            "optimizer": {"lr": math.nan, "betas": [0.5]},
            "precision": {"master_weights": "fp32"},
        },
        task="sequence_classification",
        labels={"k": 3},
        evaluation={"fraction": 2},
    )
    assert set(refused(document)) == {
        "/recipe/amax_hist_len",
        "/recipe/fp8_format",
        "/recipe/margin",
        "/training/steps",
        "/training/optimizer/lr",
        "/training/optimizer/betas",
        "/training/precision/master_weights",  # a rule between fields
        "/data/format",  # a rule between sections
        "/labels/k",
        "/evaluation/fraction",
    }


def test_no_rule_blames_a_field_for_the_fault_of_another(spec: Spec, refused: Refused) -> None:
    misspelt = {"source": "jsonl", "path": "x", "formt": "labelled"}
    assert set(refused(spec(task="sequence_classification", data=misspelt))) == {"/data/formt"}
    training = {"steps": "20", "schedule": {"warmup_steps": 2000}}
    assert set(refused(spec(training=training))) == {"/training/steps"}
    pathless = {"source": "jsonl", "format": "labelled"}
    assert set(refused(spec(data=pathless))) == {"/data/path"}


def test_suggestions_are_for_programs_too(spec: Spec, refused: Refused) -> None:
    problems = refused(spec(recipe={"amax_hist_len": 1, "engine": "te"}, taks="x", lr=1.0))
    assert problems["/recipe/amax_hist_len"].suggestion == "amax_history_len"
    assert problems["/taks"].suggestion == "task"
    assert problems["/lr"].suggestion == "/training/optimizer/lr"
    assert problems["/lr"].to_dict() == {
        "pointer": "/lr",
        "message": problems["/lr"].message,
        "code": "unknown_key",
        "suggestion": "/training/optimizer/lr",
    }


def test_the_exception_reads_well(spec: Spec) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse_spec(spec(recipe={"margin": -1}, priority=1000))
    assert str(caught.value) == (
        "/priority: must be at most 100, not 1000\n/recipe/margin: must be at least 0, not -1"
    )


@pytest.mark.parametrize("value", [1, math.nan])
def test_a_flood_of_faults_is_cut_off(spec: Spec, value: float) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse_spec(spec(**{f"key{i}": value for i in range(40_000)}))
    assert len(caught.value.problems) == 100
