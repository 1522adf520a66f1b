"""A converted model as a plain Hugging Face checkpoint; the model in training stays converted."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from fp8core.conversion import ConversionReport
from fp8core.durable import PARTIAL_PREFIX, sync_file, sync_folder, told_when_full
from fp8core.numerics.float8_weight import Float8Weight

__all__ = ["export", "publish"]

_SHARD_SIZE = "5GB"


class SavedTokenizer(Protocol):
    """A tokenizer that can be written beside a model."""

    def save(self, folder: Path) -> Any: ...


def export(
    model: nn.Module,
    report: ConversionReport | None,
    tokenizer: SavedTokenizer | None,
    folder: str | os.PathLike[str],
) -> None:
    """Write ``model`` and ``tokenizer`` so that ``AutoModel*.from_pretrained(folder)`` loads them.

    Keys are those of the original architecture, through ``report.key_map``; tied weights are
    written once; weights are written in the dtype they have. The folder appears whole or not at
    all: it is written beside itself and renamed, and an earlier export there is replaced.

    Raises ``StorageFull`` when the disk is full, and TypeError for a model that is not one of
    transformers', or of which some weights are but casts to FP8.
    """
    if not hasattr(model, "save_pretrained"):
        raise TypeError(f"{type(model).__name__} is not a transformers model")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, Float8Weight):
            raise TypeError(f"{name} lies in FP8; export the model that it was cast from")
    publish(Path(folder), lambda partial: _write(model, report, partial), tokenizer)


def publish(target: Path, write: Callable[[Path], None], tokenizer: SavedTokenizer | None) -> None:
    """Makes the folder ``target`` of what ``write`` and ``tokenizer`` put there: whole or not."""
    with told_when_full(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{PARTIAL_PREFIX}{secrets.token_hex(8)}")
        partial.mkdir()
        try:
            write(partial)
            if tokenizer is not None:
                tokenizer.save(partial)
            _sync_all(partial)
            _move_into_place(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _write(model: Any, report: ConversionReport | None, folder: Path) -> None:
    state = {key: value.detach() for key, value in model.state_dict().items()}
    if report is not None:
        state = report.key_map.to_original(state)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    generation = getattr(model, "generation_config", None)
    kept = (model.config.dtype, model.config.architectures)
    try:
        if generation is not None and not _can_be_saved(generation):
            model.generation_config = GenerationConfig.from_model_config(model.config)
        with torch.no_grad():
            model.save_pretrained(folder, state_dict=state, max_shard_size=_SHARD_SIZE)
    except SafetensorError as error:
        if "os error 28" in str(error):  # its own words for ENOSPC
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    finally:
        # Saving writes into the live configuration what belongs into the file only.
        model.config.dtype, model.config.architectures = kept
        if generation is not None:
            model.generation_config = generation
        if bars:
            transformers_logging.enable_progress_bar()


def _can_be_saved(generation: Any) -> bool:
    """transformers refuses to write settings that contradict one another, at the end of a run."""
    try:
        generation.validate(strict=True)
    except ValueError:
        return False
    return True


def _sync_all(folder: Path) -> None:
    """On disk before the rename: a crash must not leave a whole-looking folder of empty files."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)
    sync_folder(folder)


def _move_into_place(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
    else:
        old = target.with_name(f"{PARTIAL_PREFIX}{secrets.token_hex(8)}")
        target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync_folder(target.parent)
