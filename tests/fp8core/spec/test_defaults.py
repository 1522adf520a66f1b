"""What is filled in where nothing is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from fp8core.spec import JobSpec, Precision, TEDelayed, parse_spec

Spec = Callable[..., dict[str, Any]]

COLUMNS = {
    "text": "text", "prompt": "prompt", "completion": "completion", "messages": "messages",
    "label": "label",
}  # fmt: skip
DATA = {
    "format": "text", "columns": COLUMNS, "labels": None, "shuffle": True, "shuffle_seed": 0,
    "epochs": None, "packing": True, "append_end_of_text": True,
}  # fmt: skip
RESOLVED: dict[str, Any] = {
    "spec_version": 1,
    "name": None,
    "labels": {},
    "notes": "",
    "priority": 0,
    "model": {"source": "path", "path": "models/tiny"},
    "tokenizer": {"source": "model"},
    "data": {"source": "jsonl", "path": "train.jsonl", **DATA},
    "task": "causal_lm",
    "recipe": {
        "engine": "te",
        "scaling": "delayed",
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "override_linear_precision": [False, False, False],
        "use_autocast_during_eval": False,
        "fp8_dpa": False,
    },
    "conversion": {
        "linear": True,
        "layer_norm": True,
        "rms_norm": True,
        "output_head": False,
        "skip": [],
        "only": None,
        "keep_first_last": False,
        "fuse": "auto",
        "small_gemm": "auto",
    },
    "adapter": None,
    "training": {
        "steps": 1000,
        "batch_size": 8,
        "sequence_length": 512,
        "gradient_accumulation": 1,
        "seed": 0,
        "optimizer": {
            "name": "adamw", "lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01,
        },
        "schedule": {"name": "cosine", "warmup_steps": 0, "final_lr_ratio": 0.1},
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "recomputed_blocks": None,
        "cuda_graphs": "auto",
        "mask_probability": 0.15,
        "precision": {
            "preset": "method", "weights": "fp32", "master_weights": "none", "gradients": "fp32",
            "optimizer_states": "fp32", "communication": "fp32",
        },
        "early_stopping": None,
        "on_divergence": {"action": "fail", "max_consecutive": 10},
        "parity": None,
    },
    "evaluation": {"every_steps": 200, "fraction": 0.02, "max_batches": None},
    "checkpoint": {"every_steps": 200, "keep_last": 3, "keep_best": 1, "final": True},
    "telemetry": {
        "log_every_steps": 1, "fp8_every_steps": 10, "tensorboard": False, "mlflow": None,
        "wandb": None,
    },
    "resources": {"device": "auto", "gpus": 1, "cpu_ranks": 1, "rank_timeout_seconds": 600},
    "limits": {
        "lease_ttl_seconds": 900,
        "max_restarts": 3,
        "restart_backoff_seconds": 5,
        "cancel_deadline_seconds": 120,
        "max_run_time_seconds": None,
        "max_queue_time_seconds": None,
        "stall_timeout_seconds": 1800,
        "idle_gpu_timeout_seconds": None,
        "on_stall": "report",
    },
    "secrets": {},
}  # fmt: skip


def test_the_minimum_is_model_data_and_recipe(spec: Spec) -> None:
    assert parse_spec(spec()).resolved() == RESOLVED


def test_resolved_is_json_and_leads_with_what_chooses_a_part(spec: Spec) -> None:
    resolved = parse_spec(spec()).resolved()
    assert json.loads(json.dumps(resolved, allow_nan=False)) == resolved
    assert list(resolved["recipe"])[:2] == ["engine", "scaling"]
    assert next(iter(resolved["data"])) == "source"
    assert next(iter(resolved["training"]["schedule"])) == "name"


RECIPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"engine": "te", "scaling": "current"},
        {
            "fp8_format": "HYBRID", "use_power_2_scales": False,
            "override_linear_precision": [False, False, False], "use_autocast_during_eval": False,
            "fp8_dpa": False,
        },
    ),
    (
        {"engine": "te", "scaling": "block"},
        {
            "fp8_format": "E4M3", "use_f32_scales": False, "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1, "backward_override": None,
            "use_autocast_during_eval": False,
        },
    ),
    (
        {"engine": "te", "scaling": "mxfp8"},
        {
            "fp8_format": "E4M3", "enable_2d_quantization": False, "backward_override": None,
            "use_autocast_during_eval": False, "fp8_dpa": False,
        },
    ),
    (
        {"engine": "te", "scaling": "nvfp4"},
        {
            "disable_rht": False, "disable_stochastic_rounding": False,
            "disable_2d_quantization": False, "backward_override": None,
            "use_autocast_during_eval": False,
        },
    ),
    ({"engine": "torchao"}, {"scaling": "tensorwise"}),
    (
        {"engine": "emulated"},
        {
            key: value
            for key, value in RESOLVED["recipe"].items()
            if key not in ("engine", "fp8_dpa")
        },
    ),
    (
        {"engine": "emulated", "scaling": "current"},
        {
            "fp8_format": "HYBRID", "use_power_2_scales": False,
            "override_linear_precision": [False, False, False], "use_autocast_during_eval": False,
        },
    ),
    (
        {"engine": "amp"},
        {"dtype": "bf16", "initial_loss_scale": 65536.0, "growth_interval": 2000},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "filled"), RECIPES)
def test_each_recipe_has_its_own_fields(
    spec: Spec, given: dict[str, Any], filled: dict[str, Any]
) -> None:
    assert parse_spec(spec(recipe=given)).resolved()["recipe"] == {**given, **filled}


SOURCES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model", {"source": "huggingface", "id": "a/b"}, {"revision": None}),
    ("model", {"source": "config", "config": {"model_type": "llama", "x": [1.5, None]}}, {}),
    ("model", {"source": "job", "job": "job_1"}, {"checkpoint": "model"}),
    ("model", {"source": "job", "job": "job_1", "checkpoint": 200}, {}),
    ("tokenizer", {"source": "huggingface", "id": "a"}, {"revision": None}),
    ("tokenizer", {"source": "path", "path": "t"}, {}),
    ("tokenizer", {"source": "train"}, {"vocab_size": 4096}),
    ("data", {"source": "text", "path": "a.txt"}, {**DATA, "document_separator": None}),
    ("data", {"source": "parquet", "path": "a.parquet"}, DATA),
    (
        "data",
        {"source": "huggingface", "id": "a/b"},
        {**DATA, "name": None, "revision": None, "split": "train"},
    ),
    ("data", {"source": "upload", "dataset": "set-1"}, DATA | {"sha256": None}),
    ("data", {"source": "builtin"}, {**DATA, "name": "python_topics"}),
]


@pytest.mark.parametrize(("section", "given", "filled"), SOURCES)
def test_each_source_has_its_own_fields(
    spec: Spec, section: str, given: dict[str, Any], filled: dict[str, Any]
) -> None:
    assert parse_spec(spec(**{section: given})).resolved()[section] == {**given, **filled}


def test_a_model_from_a_config_reads_bytes(spec: Spec) -> None:
    config = {"source": "config", "config": {"model_type": "llama"}}
    assert parse_spec(spec(model=config)).tokenizer.source == "bytes"


@pytest.mark.parametrize("name", ["bytes", "model"])
def test_a_tokenizer_may_be_named_by_a_string(spec: Spec, name: str) -> None:
    assert parse_spec(spec(tokenizer=name)).tokenizer.source == name


def test_labelled_texts_are_not_packed(spec: Spec) -> None:
    data = {"source": "jsonl", "path": "a", "format": "labelled"}
    parsed = parse_spec(spec(data=data, task="sequence_classification"))
    assert parsed.data.packing is False


def test_throughput_stands_for_bf16(spec: Spec) -> None:
    shorthand = parse_spec(spec(training={"precision": "throughput"})).training.precision
    assert shorthand == Precision(
        preset="throughput", weights="bf16", gradients="bf16", optimizer_states="bf16"
    )
    assert shorthand.communication == "fp32"
    assert shorthand.master_weights == "none"


def test_memory_stands_for_bf16_and_states_of_8_bits(spec: Spec) -> None:
    parsed = parse_spec(spec(training={"precision": "memory"})).training.precision
    assert (parsed.weights, parsed.gradients, parsed.optimizer_states) == ("bf16", "bf16", "8bit")
    assert parsed.master_weights == "none"


def test_a_preset_only_sets_defaults(spec: Spec) -> None:
    precision = {"preset": "throughput", "optimizer_states": "fp32", "master_weights": "fp32"}
    parsed = parse_spec(spec(training={"precision": precision})).training.precision
    assert (parsed.weights, parsed.gradients, parsed.optimizer_states) == ("bf16", "bf16", "fp32")


def test_a_spec_cannot_be_changed(spec: Spec) -> None:
    parsed = parse_spec(spec())
    with pytest.raises(ValidationError):
        parsed.training.steps = 2  # type: ignore[misc]


def test_the_class_itself_takes_every_spelling_and_keeps_the_rules(spec: Spec) -> None:
    built = JobSpec(**spec(recipe={"amax_history_length": 3}))
    assert isinstance(built.recipe, TEDelayed)
    assert built.recipe.amax_history_len == 3
    with pytest.raises(ValidationError, match="does not fit into 5 steps"):
        JobSpec(**spec(training={"steps": 5, "schedule": {"warmup_steps": 6}}))
    with pytest.raises(ValidationError, match="MS-AMP"):
        JobSpec(**spec(recipe={"backend": "MSAMP"}))
