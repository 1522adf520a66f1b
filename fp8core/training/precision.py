"""``training.precision``: the formats of what training stores, put into effect."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["dtype_of", "set_gradient_dtype"]

# Codes of 8 bits are bytes; what they mean, `fp8core.training.moments` says.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a format named in the spec."""
    return _DTYPES[name]


def set_gradient_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Has autograd keep and accumulate the gradient of every trainable parameter in ``dtype``."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.grad_dtype = dtype
