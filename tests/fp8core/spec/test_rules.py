"""Fields that must fit one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fp8core.spec import Problem, parse_spec

Spec = Callable[..., dict[str, Any]]
Refused = Callable[[Any], dict[str, Problem]]

CONFIG = {"source": "config", "config": {"model_type": "llama"}}
LABELLED = {"source": "jsonl", "path": "a", "format": "labelled"}
CHAT = {"source": "jsonl", "path": "a", "format": "chat"}
PROMPTS = {"source": "jsonl", "path": "a", "format": "prompt_completion"}
CLASSIFY = "sequence_classification"

DECODER = {"source": "config", "config": {"model_type": "bert", "is_decoder": True}}

STORED = {"base_weights": "fp8"}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"adapter": STORED, "recipe": {"engine": "amp"}},
        "/adapter/base_weights",
        "amp multiplies no weight in FP8",
    ),
    (
        {"adapter": STORED, "recipe": {"engine": "torchao"}},
        "/adapter/base_weights",
        "torchao casts each weight itself",
    ),
    *(
        (
            {"adapter": STORED, "recipe": {"engine": "te", "scaling": scaling}},
            "/adapter/base_weights",
            f"the scaling {scaling} gives each block of a weight a scale of its own",
        )
        for scaling in ("block", "mxfp8", "nvfp4")
    ),
    (
        {"adapter": STORED, "recipe": {"override_linear_precision": [False, False, True]}},
        "/adapter/base_weights",
        "would read rounded weights",
    ),
    (
        {"adapter": STORED, "conversion": {"linear": False}},
        "/adapter/base_weights",
        "would have no effect: conversion.linear is false",
    ),
    (
        {"model": DECODER, "tokenizer": "bytes", "task": "masked_lm"},
        "/model/config/is_decoder",
        "attention to earlier tokens alone",
    ),
    (
        {"training": {"batch_size": 65_536, "sequence_length": 1025}},
        "/training/batch_size",
        "fits no machine",
    ),
    ({"model": CONFIG, "tokenizer": "model"}, "/tokenizer", "no tokenizer of its own"),
    ({"data": LABELLED}, "/data/format", "causal_lm needs the format text or prompt_completion"),
    ({"data": LABELLED, "task": "masked_lm"}, "/data/format", "masked_lm needs the format text"),
    (
        {"recipe": {"engine": "te", "scaling": "block", "x_block_scaling_dim": 2}},
        "/recipe/x_block_scaling_dim",
        "of x_block_scaling_dim and w_block_scaling_dim only one may be 2",
    ),
    (
        {"recipe": {"engine": "te", "scaling": "block", "grad_block_scaling_dim": 2}},
        "/recipe/grad_block_scaling_dim",
        "cannot be multiplied",
    ),
    (
        {
            "recipe": {
                "engine": "te",
                "scaling": "mxfp8",
                "fp8_dpa": True,
                "backward_override": "dequantized",
            }
        },
        "/recipe/fp8_dpa",
        "attention in FP8 beside backward_override has not been tried",
    ),
    ({"data": CHAT, "task": "masked_lm"}, "/data/format", "needs the format text, not chat"),
    ({"data": PROMPTS, "task": "masked_lm"}, "/data/format", "needs the format text"),
    ({"task": CLASSIFY}, "/data/format", "needs the format labelled, not text"),
    ({"data": CHAT, "task": CLASSIFY}, "/data/format", "needs the format labelled, not chat"),
    (
        {"data": {"source": "text", "path": "a", "format": "chat"}},
        "/data/format",
        "the source text holds plain text only",
    ),
    ({"data": {"source": "builtin", "format": "chat"}}, "/data/format", "the source builtin"),
    (
        {"data": {**CHAT, "columns": {"prompt": "p"}}},
        "/data/columns/prompt",
        "no effect with the format chat",
    ),
    (
        {"data": {"source": "builtin", "columns": {"text": "t"}}},
        "/data/columns/text",
        "no effect with the source builtin",
    ),
    (
        {"data": {"source": "jsonl", "path": "a", "labels": ["x", "y"]}},
        "/data/labels",
        "only the format labelled",
    ),
    (
        {"data": {**LABELLED, "labels": ["x", "y", "x"]}, "task": CLASSIFY},
        "/data/labels/2",
        '"x" is listed twice',
    ),
    ({"data": {**LABELLED, "packing": True}, "task": CLASSIFY}, "/data/packing", "never packed"),
    (
        {"limits": {"on_stall": "fail", "stall_timeout_seconds": None}},
        "/limits/on_stall",
        "without stall_timeout_seconds",
    ),
    (
        {
            "limits": {"idle_gpu_timeout_seconds": 600},
            "resources": {"device": "cpu"},
            "recipe": {"engine": "amp"},
        },
        "/limits/idle_gpu_timeout_seconds",
        "a job on a CPU has no GPU",
    ),
    (
        {"limits": {"on_stall": "restart", "max_restarts": 0}},
        "/limits/on_stall",
        "max_restarts is 0",
    ),
    (
        {"limits": {"restart_backoff_seconds": 9, "max_restarts": 0}},
        "/limits/restart_backoff_seconds",
        "nothing is restarted",
    ),
    (
        {"training": {"on_divergence": {"action": "fallback_bf16", "max_consecutive": 3}}},
        "/training/on_divergence/max_consecutive",
        "only skip_step skips",
    ),
    (
        {"recipe": {"engine": "amp"}, "training": {"on_divergence": "fallback_bf16"}},
        "/training/on_divergence",
        "amp converts no layer",
    ),
    (
        {"recipe": {"fp8_dpa": True}, "conversion": {"fuse": "none"}},
        "/recipe/fp8_dpa",
        'no effect with conversion.fuse "none"',
    ),
    (
        {"recipe": {"fp8_dpa": True, "override_linear_precision": [False, False, True]}},
        "/recipe/fp8_dpa",
        "has not been tried",
    ),
    (
        {"recipe": {"fp8_dpa": True, "scaling": "mxfp8"}, "task": "masked_lm"},
        "/recipe/fp8_dpa",
        "only causal_lm has any",
    ),
    (
        {"training": {"recomputed_blocks": 4}},
        "/training/recomputed_blocks",
        "without gradient_checkpointing",
    ),
    (
        {"training": {"steps": 10, "parity": {"steps": 11}}},
        "/training/parity/steps",
        "more than the job's 10",
    ),
    (
        {"recipe": {"engine": "amp"}, "training": {"parity": {"steps": 5}}},
        "/training/parity/dtype",
        "compared with itself",
    ),
    (
        {"training": {"precision": "throughput", "parity": {"steps": 5, "dtype": "fp32"}}},
        "/training/parity/dtype",
        "must then be fp32",
    ),
    (
        {
            "adapter": {},
            "training": {"precision": {"weights": "bf16", "master_weights": "fp32"}},
        },
        "/training/precision/master_weights",
        "the model is frozen",
    ),
    ({"resources": {"device": "cpu"}}, "/resources/device", "needs a GPU"),
    (
        {"recipe": {"engine": "emulated"}, "resources": {"device": "cpu", "gpus": 2}},
        "/resources/gpus",
        "no GPUs",
    ),
    (
        {"recipe": {"engine": "emulated"}, "resources": {"cpu_ranks": 2}},
        "/resources/cpu_ranks",
        "no effect with the device auto",
    ),
    (
        {"resources": {"rank_timeout_seconds": 60}},
        "/resources/rank_timeout_seconds",
        "waits for no other",
    ),
    (
        {"recipe": {"engine": "amp", "dtype": "bf16", "growth_interval": 10}},
        "/recipe/growth_interval",
        "only fp16 scales the loss",
    ),
    (
        {"recipe": {"engine": "amp", "dtype": "fp32", "initial_loss_scale": 2.0}},
        "/recipe/initial_loss_scale",
        "no effect with dtype fp32",
    ),
    (
        {
            "recipe": {"engine": "amp", "dtype": "fp32"},
            "training": {"precision": {"weights": "bf16"}},
        },
        "/training/precision/weights",
        "must then be fp32",
    ),
    (
        {
            "recipe": {"engine": "amp", "dtype": "fp16"},
            "training": {"precision": {"gradients": "bf16"}},
        },
        "/training/precision/gradients",
        "needs gradients in fp32",
    ),
    (
        {"training": {"precision": {"master_weights": "fp32"}}},
        "/training/precision/master_weights",
        "their own master copy",
    ),
    (
        {"training": {"precision": {"communication": "bf16"}}},
        "/training/precision/communication",
        "one rank",
    ),
    (
        {"training": {"steps": 100, "schedule": {"warmup_steps": 101}}},
        "/training/schedule/warmup_steps",
        "101 steps does not fit into 100",
    ),
    (
        {
            "training": {
                "steps": 100,
                "schedule": {"name": "warmup_stable_decay", "warmup_steps": 51, "decay_steps": 50},
            }
        },
        "/training/schedule/decay_steps",
        "do not fit into 100 steps",
    ),
    (
        {"training": {"mask_probability": 0.2}},
        "/training/mask_probability",
        "only masked_lm masks",
    ),
    (
        {"training": {"early_stopping": {"patience": 2}}, "evaluation": {"fraction": 0}},
        "/training/early_stopping",
        "fraction is 0",
    ),
    (
        {"training": {"early_stopping": {"patience": 2}}, "evaluation": {"every_steps": 0}},
        "/training/early_stopping",
        "every_steps is 0",
    ),
]


@pytest.mark.parametrize(("sections", "pointer", "words"), REFUSED)
def test_a_combination_without_sense_is_refused(
    spec: Spec, refused: Refused, sections: dict[str, Any], pointer: str, words: str
) -> None:
    problems = refused(spec(**sections))
    assert list(problems) == [pointer]
    assert problems[pointer].code == "conflict"
    assert words in problems[pointer].message


ACCEPTED: list[dict[str, Any]] = [
    {"model": CONFIG, "tokenizer": "bytes"},
    {"model": CONFIG, "tokenizer": {"source": "train"}},
    {
        "recipe": {
            "engine": "te",
            "scaling": "block",
            "x_block_scaling_dim": 2,
            "w_block_scaling_dim": 1,
        }
    },
    {"data": CHAT},
    {"data": {**PROMPTS, "columns": {"prompt": "question", "completion": "answer"}}},
    {"data": {**LABELLED, "columns": {"text": "t", "label": "l"}}, "task": CLASSIFY},
    {"data": {**LABELLED, "labels": ["x", "y"], "packing": False}, "task": CLASSIFY},
    {"task": "masked_lm", "training": {"mask_probability": 0.2}},
    {"recipe": {"engine": "emulated"}, "resources": {"device": "cpu"}},
    {"recipe": {"engine": "torchao"}, "resources": {"device": "cpu"}},
    {"recipe": {"engine": "amp", "dtype": "fp16", "growth_interval": 10}},
    {"training": {"precision": {"weights": "bf16", "master_weights": "fp32"}}},
    {"training": {"precision": {"communication": "bf16"}}, "resources": {"gpus": 2}},
    {
        "recipe": {"engine": "emulated"},
        "training": {"precision": {"communication": "bf16"}},
        "resources": {"device": "cpu", "cpu_ranks": 2, "rank_timeout_seconds": 60},
    },
    {"training": {"steps": 100, "schedule": {"warmup_steps": 100}}},
    {
        "training": {
            "steps": 100,
            "schedule": {"name": "warmup_stable_decay", "warmup_steps": 50, "decay_steps": 50},
        }
    },
    {"training": {"early_stopping": {"patience": 2, "min_delta": 0.01}}},
]


@pytest.mark.parametrize("sections", ACCEPTED)
def test_a_combination_with_sense_is_accepted(spec: Spec, sections: dict[str, Any]) -> None:
    resolved = parse_spec(spec(**sections)).resolved()
    assert parse_spec(resolved).resolved() == resolved


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"is_decoder": True}, "causal_lm"),
        ({"is_decoder": False}, "masked_lm"),
        ({"is_decoder": True, "is_encoder_decoder": True}, "masked_lm"),
    ],
)
def test_a_decoder_is_refused_for_masked_tokens_alone(
    spec: Spec, config: dict[str, Any], task: str
) -> None:
    model = {"source": "config", "config": {"model_type": "bert", **config}}
    assert parse_spec(spec(model=model, tokenizer="bytes", task=task)).task == task
