"""What fields must say together: a combination that could not be honoured is refused here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import fp8core.spec.recipe_rules  # noqa: F401  # adds its rules to the table
from fp8core.spec.document import quoted
from fp8core.spec.problems import Problem
from fp8core.spec.rule_table import RULES, changed, conflict, reads
from fp8core.spec.sizes import impossible_sizes
from fp8core.spec.sources import (
    BuiltinData,
    ConfigModel,
    ModelTokenizer,
    TextData,
    TrainTokenizer,
)
from fp8core.spec.training import WarmupStableDecaySchedule

if TYPE_CHECKING:
    from fp8core.spec.job import JobSpec

# Far beyond what a GPU holds: the token ids alone take half a gigabyte.
_MOST_TOKENS = 2**26


def broken_rules(spec: JobSpec, unreliable: Iterable[str] = ()) -> list[Problem]:
    """The problems of fields with one another.

    A rule that reads a field at, above or below one of the pointers in `unreliable` is left out:
    that field has a problem of its own, and its value here is not what was submitted.
    """
    spoiled = list(unreliable)
    if not spoiled:
        return [problem for _, rule in RULES for problem in rule(spec)]
    return [
        problem
        for pointers, rule in RULES
        if not any(_overlap(pointer, other) for pointer in pointers for other in spoiled)
        for problem in rule(spec)
    ]


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")


@reads("/model")
def _config_can_be_built(spec: JobSpec) -> Iterator[Problem]:
    if not isinstance(spec.model, ConfigModel):
        return
    config = spec.model.config
    if not isinstance(config.get("model_type"), str):
        message = 'is required: the kind of model as text, such as "llama"'
        yield Problem("/model/config/model_type", message, "missing")
    for key in ("auto_map", "trust_remote_code"):
        if config.get(key):
            yield Problem(
                f"/model/config/{key}",
                "code that comes with a model is not run; use a model type that transformers has",
                "unsupported",
            )


@reads("/model")
def _config_has_possible_sizes(spec: JobSpec) -> Iterator[Problem]:
    if isinstance(spec.model, ConfigModel):
        yield from impossible_sizes(spec.model.config, ("model", "config"))


@reads("/model", "/tokenizer", "/training/sequence_length")
def _config_is_large_enough(spec: JobSpec) -> Iterator[Problem]:
    """What a configuration says by itself; a node looks at those of folders and hubs."""
    if not isinstance(spec.model, ConfigModel):
        return
    positions = spec.model.config.get("max_position_embeddings")
    length = spec.training.sequence_length
    if isinstance(positions, int) and 1 <= positions < length:
        yield conflict(
            "/training/sequence_length",
            f"{length} tokens are more than the model's {positions} positions "
            "(max_position_embeddings of its config)",
        )
    size = spec.model.config.get("vocab_size")
    if isinstance(spec.tokenizer, TrainTokenizer) and isinstance(size, int):
        wanted = spec.tokenizer.vocab_size
        if 1 <= size < wanted:
            yield conflict(
                "/model/config/vocab_size",
                f"the model's vocabulary has {size} tokens, the tokenizer's has {wanted}",
            )


@reads("/model", "/task")
def _config_looks_both_ways(spec: JobSpec) -> Iterator[Problem]:
    """Where masked tokens are to be told; a node looks at configurations of folders and hubs."""
    if spec.task != "masked_lm" or not isinstance(spec.model, ConfigModel):
        return
    config = spec.model.config
    if config.get("is_decoder") and not config.get("is_encoder_decoder"):
        yield conflict(
            "/model/config/is_decoder",
            "attention to earlier tokens alone cannot tell a masked token by both sides; leave it "
            "out, or use task causal_lm",
        )


@reads("/model/source", "/tokenizer")
def _model_has_a_tokenizer(spec: JobSpec) -> Iterator[Problem]:
    if isinstance(spec.model, ConfigModel) and isinstance(spec.tokenizer, ModelTokenizer):
        yield conflict(
            "/tokenizer",
            "a model from a config has no tokenizer of its own; choose bytes, train, path or "
            "huggingface",
        )


@reads("/data/format", "/task")
def _format_fits_task(spec: JobSpec) -> Iterator[Problem]:
    fitting = {
        "causal_lm": ("text", "prompt_completion", "chat"),
        "masked_lm": ("text",),
        "sequence_classification": ("labelled",),
    }[spec.task]
    if spec.data.format not in fitting:
        yield conflict(
            "/data/format",
            f"the task {spec.task} needs the format {' or '.join(fitting)}, not {spec.data.format}",
        )


@reads("/data/format", "/data/source")
def _format_fits_source(spec: JobSpec) -> Iterator[Problem]:
    plain = isinstance(spec.data, TextData | BuiltinData)
    if plain and spec.data.format != "text":
        yield conflict(
            "/data/format",
            f"the source {spec.data.source} holds plain text only, so the format must be text",
        )


@reads("/data/format", "/data/source", "/data/columns")
def _columns_are_read(spec: JobSpec) -> Iterator[Problem]:
    read = {
        "text": ("text",),
        "prompt_completion": ("prompt", "completion"),
        "chat": ("messages",),
        "labelled": ("text", "label"),
    }[spec.data.format]
    if isinstance(spec.data, TextData | BuiltinData):
        read = ()
    for column in changed(spec.data.columns):
        if column not in read:
            what = f"format {spec.data.format}" if read else f"source {spec.data.source}"
            message = f"would have no effect with the {what}; remove it"
            yield conflict(f"/data/columns/{column}", message)


@reads("/data/format", "/data/labels")
def _labels_need_their_format(spec: JobSpec) -> Iterator[Problem]:
    labels = spec.data.labels
    if labels is None:
        return
    if spec.data.format != "labelled":
        yield conflict("/data/labels", "would have no effect; only the format labelled has any")
    seen: set[str] = set()
    for index, label in enumerate(labels):
        if label in seen:
            yield conflict(f"/data/labels/{index}", f"the class {quoted(label)} is listed twice")
        seen.add(label)


@reads("/data/format", "/data/packing")
def _packing_fits_format(spec: JobSpec) -> Iterator[Problem]:
    if spec.data.packing and spec.data.format == "labelled":
        yield conflict(
            "/data/packing", "labelled texts are never packed: each has a class of its own"
        )


@reads("/training/precision/weights", "/training/precision/master_weights")
def _master_weights_differ(spec: JobSpec) -> Iterator[Problem]:
    precision = spec.training.precision
    if precision.master_weights == "fp32" and precision.weights == "fp32":
        yield conflict(
            "/training/precision/master_weights",
            'fp32 weights are their own master copy; choose "none", or weights in bf16',
        )


@reads("/training/precision/communication", "/resources")
def _communication_happens(spec: JobSpec) -> Iterator[Problem]:
    if spec.training.precision.communication != "fp32" and spec.resources.ranks == 1:
        yield conflict(
            "/training/precision/communication",
            "one rank sends gradients to no other, so this would have no effect; leave it at fp32",
        )


@reads("/resources")
def _ranks_have_devices(spec: JobSpec) -> Iterator[Problem]:
    resources = spec.resources
    if resources.device == "cpu" and resources.gpus > 1:
        yield conflict(
            "/resources/gpus",
            "a job on a CPU has no GPUs; leave it at 1, and write cpu_ranks for several ranks",
        )
    if resources.device != "cpu" and resources.cpu_ranks > 1:
        yield conflict(
            "/resources/cpu_ranks",
            f"would have no effect with the device {resources.device}; set device to cpu, or write "
            "gpus for several ranks on GPUs",
        )
    if resources.ranks == 1 and "rank_timeout_seconds" in changed(resources):
        yield conflict(
            "/resources/rank_timeout_seconds",
            "one rank waits for no other, so this would have no effect; leave it out",
        )


@reads("/training/batch_size", "/training/sequence_length")
def _micro_batch_is_possible(spec: JobSpec) -> Iterator[Problem]:
    tokens = spec.training.batch_size * spec.training.sequence_length
    if tokens > _MOST_TOKENS:
        yield conflict(
            "/training/batch_size",
            f"a micro-batch of {tokens} tokens (batch_size times sequence_length) fits no machine; "
            f"at most {_MOST_TOKENS}, and gradient_accumulation makes a larger step of small ones",
        )


@reads("/training/gradient_checkpointing", "/training/recomputed_blocks")
def _recomputed_blocks_are_recomputed(spec: JobSpec) -> Iterator[Problem]:
    if spec.training.recomputed_blocks is not None and not spec.training.gradient_checkpointing:
        yield conflict(
            "/training/recomputed_blocks",
            "would have no effect without gradient_checkpointing; set both",
        )


@reads("/training/steps", "/training/schedule")
def _schedule_fits_steps(spec: JobSpec) -> Iterator[Problem]:
    steps, schedule = spec.training.steps, spec.training.schedule
    warmup = schedule.warmup_steps
    if warmup > steps:
        yield conflict(
            "/training/schedule/warmup_steps",
            f"a warm-up of {warmup} steps does not fit into {steps} steps (/training/steps)",
        )
    elif isinstance(schedule, WarmupStableDecaySchedule) and warmup + schedule.decay_steps > steps:
        yield conflict(
            "/training/schedule/decay_steps",
            f"a warm-up of {warmup} and a decay of {schedule.decay_steps} steps do not fit into "
            f"{steps} steps (/training/steps)",
        )


@reads("/task", "/training/mask_probability")
def _masks_are_used(spec: JobSpec) -> Iterator[Problem]:
    if spec.task != "masked_lm" and "mask_probability" in changed(spec.training):
        yield conflict(
            "/training/mask_probability",
            f"would have no effect with the task {spec.task}; only masked_lm masks tokens",
        )


@reads("/training/early_stopping", "/evaluation/every_steps", "/evaluation/fraction")
def _early_stopping_can_happen(spec: JobSpec) -> Iterator[Problem]:
    if spec.training.early_stopping is None:
        return
    if spec.evaluation.fraction == 0:
        yield conflict(
            "/training/early_stopping", "needs an evaluation, and evaluation.fraction is 0"
        )
    elif spec.evaluation.every_steps == 0:
        yield conflict(
            "/training/early_stopping",
            "needs evaluations during training, and evaluation.every_steps is 0",
        )


@reads("/limits")
def _limits_have_effect(spec: JobSpec) -> Iterator[Problem]:
    limits = spec.limits
    if limits.on_stall != "report" and limits.stall_timeout_seconds is None:
        yield conflict(
            "/limits/on_stall", "would have no effect without stall_timeout_seconds; set both"
        )
    if limits.max_restarts == 0:
        if limits.on_stall == "restart":
            yield conflict(
                "/limits/on_stall", "cannot restart a job whose max_restarts is 0; choose fail"
            )
        if "restart_backoff_seconds" in changed(limits):
            yield conflict(
                "/limits/restart_backoff_seconds",
                "would have no effect: max_restarts is 0, so nothing is restarted",
            )


@reads("/limits/idle_gpu_timeout_seconds", "/resources/device")
def _idle_gpu_needs_a_gpu(spec: JobSpec) -> Iterator[Problem]:
    if spec.limits.idle_gpu_timeout_seconds is not None and spec.resources.device == "cpu":
        yield conflict(
            "/limits/idle_gpu_timeout_seconds", "would have no effect: a job on a CPU has no GPU"
        )


@reads("/telemetry/mlflow/tracking_uri")
def _tracking_server_is_plain(spec: JobSpec) -> Iterator[Problem]:
    uri = spec.telemetry.mlflow.tracking_uri if spec.telemetry.mlflow is not None else None
    if uri is None:
        return
    pointer = "/telemetry/mlflow/tracking_uri"
    try:
        parts = urlsplit(uri)
        secret, plain = parts.username or parts.password, parts.hostname and parts.port != 0
    except ValueError:
        secret, plain = None, None
    if not plain or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        message = "must be the address of a server, such as https://mlflow.example.org"
        yield Problem(pointer, message, "unsupported")
    elif secret:
        yield Problem(
            pointer,
            "must hold no user name or password: a spec is no place for secrets; they belong into "
            "the environment of the machine that trains (MLFLOW_TRACKING_USERNAME, "
            "MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN)",
            "unsupported",
        )


@reads("/adapter", "/training/precision/master_weights")
def _adapters_have_no_master_weights(spec: JobSpec) -> Iterator[Problem]:
    if spec.adapter is not None and spec.training.precision.master_weights != "none":
        yield conflict(
            "/training/precision/master_weights",
            "adapters are trained in fp32 and the model is frozen, so nothing needs a master copy",
        )
