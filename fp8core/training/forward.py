"""A batch through a Hugging Face model."""

from __future__ import annotations

import inspect
from typing import cast

import torch
from torch import Tensor, nn

from fp8core.data.batch import Batch
from fp8core.engines.protocol import Engine
from fp8core.fusion import fused_inputs

__all__ = ["logits_in", "logits_of"]

_TAKES_CACHE: dict[type[nn.Module], bool] = {}


def logits_of(model: nn.Module, batch: Batch, engine: Engine) -> Tensor:
    """The model's logits for ``batch``, which lies on its device: [B, T, V] or [B, classes]."""
    return logits_in(model, batch, engine.compute_dtype)


def logits_in(model: nn.Module, batch: Batch, compute_dtype: torch.dtype) -> Tensor:
    """As ``logits_of``, for attention scores of ``compute_dtype``."""
    inputs = fused_inputs(model, batch, compute_dtype)
    if _takes_cache(type(model)):
        inputs["use_cache"] = False  # it serves generation only
    return cast(Tensor, model(**inputs).logits)


def _takes_cache(kind: type[nn.Module]) -> bool:
    if kind not in _TAKES_CACHE:
        _TAKES_CACHE[kind] = "use_cache" in inspect.signature(kind.forward).parameters
    return _TAKES_CACHE[kind]
