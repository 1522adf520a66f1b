"""Loading a model: transformers' own key handling over our own checked, memory-flat reading.

transformers builds the module on the meta device and fills it tensor by tensor on the target
device and in the target dtype, with its renamings, prefixes and ties. It is given the tensors of
the checkpoint as objects that read themselves when asked, so that at no time is there more than
the model plus one tensor (a few, on their way to a GPU); and it never sees a path, so it can
neither read a file that was not checked nor fetch one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from fp8core.errors import ModelUnavailable
from fp8core.models.architecture import (
    TokenizerFacts,
    architecture,
    attention_implementation,
    cannot_be_built,
)
from fp8core.models.checkpoint_files import StoredTensor, stored_tensors
from fp8core.models.source import ModelSource, locate, read_json
from fp8core.spec import JobSpec

__all__ = ["LoadedModel", "load"]

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model in evaluation mode, and where it came from.

    ``source`` is what it was made from, ``folder`` the checkpoint's (None: random weights).
    ``fresh`` are the weights that the checkpoint did not have and that were made at random (a new
    head), ``ignored`` those of the checkpoint that this model has no place for.
    """

    model: nn.Module
    config: Any
    source: ModelSource
    fresh: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def folder(self) -> Path | None:
        return self.source.folder


def load(
    spec: JobSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    tokenizer: TokenizerFacts | None = None,
    roots: Sequence[StrPath] = (),
    root_for_relative: StrPath | None = None,
    job_folder: StrPath | None = None,
    class_labels: Sequence[str] | None = None,
    source: ModelSource | None = None,
) -> LoadedModel:
    """The model of ``spec`` on ``device`` in ``dtype``.

    Random weights (a model from a configuration, a new head) depend on ``training.seed`` alone and
    leave the process's random state as it was. ``source`` is the answer of ``locate`` where the
    caller has it already; ``class_labels`` are the classes of ``sequence_classification``.

    Raises ``ModelUnavailable`` for what is wrong with the checkpoint, naming the file, and
    ``SpecRefused`` for what the spec asks of a model that cannot do it.
    """
    if source is None:
        source = locate(
            spec, roots=roots, root_for_relative=root_for_relative, job_folder=job_folder
        )
    config, model_class = architecture(spec, source, tokenizer=tokenizer, class_labels=class_labels)
    tensors: dict[str, StoredTensor] = {}
    if source.folder is not None:
        tensors = stored_tensors(source)
    device = torch.device(device)
    with _quiet(), _one_at_a_time(device), _seeded(spec.training.seed, device):
        with _fresh_memory_is_nan():
            model, found = _fill(source, model_class, config, tensors, device, dtype)
        fresh_keys = {*found["missing_keys"], *(key for key, _, _ in found["mismatched_keys"])}
        _initialise_forgotten(model, None if source.folder is None else fresh_keys)
    fresh: tuple[str, ...] = ()
    if source.folder is not None:
        fresh = _check_found(spec, source, model, found)
        _read_generation_config(source, model)
    return LoadedModel(
        model=model,
        config=model.config,
        source=source,
        fresh=fresh,
        ignored=tuple(sorted(found["unexpected_keys"])),
    )


def _fill(
    source: ModelSource,
    model_class: type[Any],
    config: Any,
    tensors: dict[str, StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Any, dict[str, Any]]:
    placement = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        model, found = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=attention_implementation(model_class),
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **placement,
        )
    except (SafetensorError, OSError) as error:
        raise ModelUnavailable(
            f"{source.label} cannot be read: {error}", pointer=source.pointer
        ) from error
    except (torch.OutOfMemoryError, MemoryError):
        raise
    # Each architecture fails in its own way on values that its configuration class let pass.
    except Exception as error:
        if "can't allocate memory" in str(error):
            raise  # the configuration may be right, and the machine too small
        raise cannot_be_built(source, "cannot be built", error) from error
    return model, found


@contextmanager
def _fresh_memory_is_nan() -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]


def _initialise_forgotten(model: Any, fresh: set[str] | None) -> None:
    """Weights that the architecture's own initialisation leaves out (biases of heads, mostly).

    They would be whatever lay in that memory. ``fresh``: names of the random ones; None: all are.
    """
    spread = getattr(model.config, "initializer_range", None) or 0.02
    for name, parameter in model.named_parameters():
        if (fresh is None or name in fresh) and bool(parameter.isnan().any()):
            with torch.no_grad():
                if parameter.dim() < 2:
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, spread)


def _check_found(
    spec: JobSpec, source: ModelSource, model: nn.Module, found: dict[str, Any]
) -> tuple[str, ...]:
    """The weights that had to be made at random; refuses all but those of a new head."""
    missing = set(found["missing_keys"])
    mismatched = {key: (stored, wanted) for key, stored, wanted in found["mismatched_keys"]}
    if found["error_msgs"]:
        raise ModelUnavailable(
            f"{source.label}: {'; '.join(map(str, found['error_msgs']))}", pointer=source.pointer
        )
    for key in sorted(mismatched):
        if spec.task != "sequence_classification" or not _belongs_to_head(model, key):
            stored, wanted = (list(shape) for shape in mismatched[key])
            raise ModelUnavailable(
                f"{source.label}: {key} has shape {stored}, its config.json asks for {wanted}",
                pointer=source.pointer,
            )
    lost = sorted(
        key for key in missing if spec.task == "causal_lm" or not _belongs_to_head(model, key)
    )
    if lost:
        names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise ModelUnavailable(f"{source.label} lacks weights: {names}", pointer=source.pointer)
    return tuple(sorted(missing | mismatched.keys()))


def _belongs_to_head(model: nn.Module, key: str) -> bool:
    """Whether ``key`` lies outside the base model, or in a pooler, which is part of a head."""
    prefix = getattr(model, "base_model_prefix", "")
    return not key.startswith(f"{prefix}.") or ".pooler." in key


def _read_generation_config(source: ModelSource, model: Any) -> None:
    """How the model was meant to generate; goes into the exported model again."""
    assert source.folder is not None
    if not model.can_generate() or not (source.folder / "generation_config.json").is_file():
        return
    values = read_json(source.file("generation_config.json"), source.label)
    try:
        model.generation_config = GenerationConfig.from_dict(values)
    except (ValueError, TypeError):
        # It has no part in training; the one made from config.json stays.
        return


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def _one_at_a_time(device: torch.device) -> Iterator[None]:
    """On a CPU, tensors read ahead by threads would lie in the same memory as the model."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    if device.type == "cpu":
        os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """What transformers would print about missing weights is checked and reported here."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
