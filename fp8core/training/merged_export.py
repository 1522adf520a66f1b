"""Adapters added to a base that trained in FP8: to the base as it was loaded, not to its cast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8core.data.tokenizers import Tokenizer
from fp8core.errors import ModelUnavailable
from fp8core.models import LoadedModel, load
from fp8core.models.adapter_targets import adapter_targets
from fp8core.spec.job import JobSpec
from fp8core.training.precision import dtype_of

if TYPE_CHECKING:
    from fp8core.training.adapter import Adapter

__all__ = ["merged_with_source"]


def merged_with_source(
    spec: JobSpec,
    loaded: LoadedModel,
    adapter: Adapter,
    *,
    tokenizer: Tokenizer,
    class_labels: Sequence[str] | None,
    device: torch.device,
) -> nn.Module:
    """``loaded`` once more, as ``spec`` says, with what ``adapter`` has trained added by ``peft``.

    By the configuration that it had, from the files that lie where it came from: no hub is asked
    again, whose model may be another one meanwhile.

    On the CPU, for ``device`` may have no room for it; but there, where some of its weights were
    made at random, which only the same device does alike. Raises ``ModelUnavailable`` where the
    base is not to be had any more, or is another one than ``loaded`` was.
    """
    from fp8core.training.adapter import attach

    assert spec.adapter is not None
    drawn = loaded.folder is None or bool(loaded.fresh)
    again = load(
        spec,
        device=device if drawn else "cpu",
        dtype=dtype_of(spec.training.precision.weights),
        tokenizer=tokenizer,
        class_labels=class_labels,
        source=loaded.source,
    )
    attached = attach(spec, again.model, adapter_targets(again.model, spec.adapter))
    if attached.base_places != adapter.base_places:
        raise ModelUnavailable(
            "the base model is another one than it was when this run began, so the adapters cannot "
            "be added to it; the last checkpoint has them, beside the base that they belong to",
            pointer="/model",
        )
    trained = adapter.tensors()
    with torch.no_grad():
        for name, parameter in attached.tensors().items():
            parameter.copy_(trained[name])
    attached.merge()
    return again.model
