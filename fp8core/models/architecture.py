"""The transformers configuration and class of a model, made to fit the task and the tokenizer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from fp8core.data.attention import POSITIONS_AFTER_PADDING
from fp8core.data.batch import round_up
from fp8core.errors import ModelUnavailable, SpecRefused, TrainingError
from fp8core.models.source import ModelSource
from fp8core.spec import JobSpec
from fp8core.spec.recipe import token_multiple

__all__ = [
    "VOCABULARY_MULTIPLE",
    "TokenizerFacts",
    "architecture",
    "attention_implementation",
    "cannot_be_built",
]

VOCABULARY_MULTIPLE = 16
"""A vocabulary that is not given is rounded up to this: an FP8 GEMM of the head needs it."""

_CLASSES = {
    "causal_lm": MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked_lm": MODEL_FOR_MASKED_LM_MAPPING,
    "sequence_classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}
# Nothing larger exists, and building so many modules would take hours before memory runs out.
_MOST_LAYERS = 10_000
_COUNTS_LAYERS = re.compile(
    r"(layer|block|depth|expert|stage)s?$|^n_layer|^num_.*layers|^block_sizes$"
)
# A name is made for each class, before anybody asks for them.
_MOST_CLASSES = 1_000_000


class TokenizerFacts(Protocol):
    """What a model needs to know of its tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int | None: ...


def architecture(
    spec: JobSpec,
    source: ModelSource,
    *,
    tokenizer: TokenizerFacts | None = None,
    class_labels: Sequence[str] | None = None,
) -> tuple[Any, type[Any]]:
    """The configuration (``PreTrainedConfig``) and model class for ``spec``'s task.

    A configuration without ``vocab_size`` takes the tokenizer's, rounded up to a multiple of 16; a
    smaller one than the tokenizer's is refused, as is a sequence longer than the model allows.

    Raises ``SpecRefused`` with the pointer of the field at fault, ``ModelUnavailable`` for a
    checkpoint whose configuration cannot be read.
    """
    values = dict(source.config)
    _refuse_runaway_counts(source, values)
    kind = _config_class(source)
    if source.folder is None:
        _refuse_misspellings(kind, values)
        _fill_from_tokenizer(values, tokenizer)
    config = _build_config(source, kind, values)
    _check_vocabulary(source, config, tokenizer)
    if getattr(config, "pad_token_id", None) is None and tokenizer is not None:
        config.pad_token_id = tokenizer.pad_id
    if spec.task == "sequence_classification":
        _set_classes(spec, config, class_labels)
    _check_length(spec, source, config)
    return config, _model_class(spec, config)


def attention_implementation(model_class: type[Any]) -> str:
    """``sdpa``, or ``eager`` for the few architectures that have no other."""
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"


def cannot_be_built(source: ModelSource, what: str, error: Exception) -> TrainingError:
    """The error of a configuration that its own architecture does not take."""
    kind: type[TrainingError] = SpecRefused if source.folder is None else ModelUnavailable
    reason = " ".join(str(error).split())
    if not reason or isinstance(error, KeyError | AssertionError | AttributeError):
        reason = f"{type(error).__name__} {reason}".strip()
    return kind(f"{source.label} {what}: {reason}", pointer=source.pointer)


def _config_class(source: ModelSource) -> type[Any]:
    model_type = source.config["model_type"]
    try:
        kind: type[Any] = CONFIG_MAPPING[model_type]
    except KeyError:
        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SpecRefused(
            f"this version of transformers has no model_type {model_type!r}{hint}",
            pointer=f"{source.pointer}/model_type" if source.folder is None else source.pointer,
        ) from None
    return kind


def _refuse_runaway_counts(source: ModelSource, values: Mapping[str, Any], place: str = "") -> None:
    for key, value in values.items():
        at = f"{place}/{key}"
        if isinstance(value, dict):
            _refuse_runaway_counts(source, value, at)
            continue
        most = _MOST_CLASSES if key in ("num_labels", "num_classes") else _MOST_LAYERS
        counted = most == _MOST_CLASSES or _COUNTS_LAYERS.search(key)
        for count in value if isinstance(value, list) else [value]:
            if counted and type(count) is int and not 0 <= count <= most:
                wrong = ValueError(f"{at[1:]} is {count}, not between 0 and {most}")
                raise cannot_be_built(source, "is not valid", wrong)


def _refuse_misspellings(kind: type[Any], values: dict[str, Any]) -> None:
    """transformers takes any key and ignores what it does not know; a near miss is a mistake."""
    known = {*kind().to_dict(), *getattr(kind, "attribute_map", {}), "num_labels", "torch_dtype"}
    for key in values:
        if key in known:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near:
            raise SpecRefused(
                f"a {kind.model_type} configuration has no {key!r}; did you mean {near[0]!r}?",
                pointer=f"/model/config/{key}",
            )


def _fill_from_tokenizer(values: dict[str, Any], tokenizer: TokenizerFacts | None) -> None:
    if tokenizer is None:
        return
    if values.get("vocab_size") is None:
        size = tokenizer.vocab_size
        values["vocab_size"] = -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    # The defaults are those of the tokenizer that the architecture was first trained with.
    for key, value in (
        ("bos_token_id", None),
        ("eos_token_id", tokenizer.eos_id),
        ("pad_token_id", tokenizer.pad_id),
    ):
        values.setdefault(key, value)


def _build_config(source: ModelSource, config_class: type[Any], values: dict[str, Any]) -> Any:
    try:
        config = config_class.from_dict(values)
    # Each architecture checks its values in its own way and with its own exceptions.
    except Exception as error:
        raise cannot_be_built(source, "is not valid", error) from error
    # What a checkpoint may ask for beyond logits costs memory, and some of it changes their form.
    config.return_dict = True
    config.output_attentions = config.output_hidden_states = False
    return config


def _check_vocabulary(source: ModelSource, config: Any, tokenizer: TokenizerFacts | None) -> None:
    size = getattr(config.get_text_config(), "vocab_size", None)
    if tokenizer is None or size is None or size >= tokenizer.vocab_size:
        return
    raise SpecRefused(
        f"the model's vocabulary has {size} tokens, the tokenizer's has {tokenizer.vocab_size}",
        pointer="/model/config/vocab_size" if source.folder is None else "/tokenizer",
    )


def _set_classes(spec: JobSpec, config: Any, class_labels: Sequence[str] | None) -> None:
    labels = class_labels if class_labels is not None else spec.data.labels
    if labels is None:
        return
    config.num_labels = len(labels)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = "single_label_classification"


def _check_length(spec: JobSpec, source: ModelSource, config: Any) -> None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return
    longest, why = positions, ""
    if config.model_type in POSITIONS_AFTER_PADDING:
        padding = config.pad_token_id or 0
        longest = max(0, positions - padding - 1)
        why = f" ({positions}, counted from behind the padding token {padding})"
    length = spec.training.sequence_length
    if length > longest:
        raise SpecRefused(
            f"{length} tokens are more than the {longest} positions{why} that {source.label} has",
            pointer="/training/sequence_length",
        )
    # In a packed row padding has position 0; elsewhere positions go on over it.
    multiple = token_multiple(spec.recipe)
    padded = round_up(length, multiple)
    if not spec.data.packing and padded > longest:
        raise SpecRefused(
            f"{length} tokens are padded to {padded}, a multiple of {multiple}, and "
            f"{source.label} has only {longest} positions{why}; ask for a multiple of {multiple}",
            pointer="/training/sequence_length",
        )


def _model_class(spec: JobSpec, config: Any) -> type[Any]:
    mapping = _CLASSES[spec.task]
    found = mapping.get(type(config), None)
    if found is None:
        able = sorted(task for task, classes in _CLASSES.items() if type(config) in classes)
        hint = f"; it has one for {', '.join(able)}" if able else ""
        raise SpecRefused(
            f"transformers has no {config.model_type} model for {spec.task}{hint}", pointer="/task"
        )
    if (
        spec.task == "causal_lm"
        and type(config) in MODEL_FOR_MASKED_LM_MAPPING
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "is_encoder_decoder", False)
    ):
        raise SpecRefused(
            f"a {config.model_type} model attends to later tokens too, so it cannot learn to "
            "predict the next one; use task masked_lm, or is_decoder in its configuration",
            pointer="/task",
        )
    if (
        spec.task == "masked_lm"
        and getattr(config, "is_decoder", False)
        and not getattr(config, "is_encoder_decoder", False)
    ):
        # Its attention says that it looks back alone, and the masks of packed documents that it may
        # look ahead: blocks fused for the one compute the other in their own code, without FP8.
        raise SpecRefused(
            f"a {config.model_type} model with is_decoder attends to earlier tokens alone, and a "
            "masked token is told by both sides; use task causal_lm, or is_decoder false in its "
            "configuration",
            pointer="/task",
        )
    if isinstance(found, tuple):
        named = [c for c in found if c.__name__ in (config.architectures or [])]
        found = (named or found)[0]
    kind: type[Any] = found
    return kind
