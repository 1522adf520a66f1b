"""``training.precision``: the formats of what training stores, put into effect or refused."""

from __future__ import annotations

import torch
from torch import nn

from fp8core.errors import SpecRefused
from fp8core.spec.job import JobSpec

__all__ = ["check_precision", "dtype_of", "set_gradient_dtype"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a format named in the spec."""
    return _DTYPES[name]


def check_precision(spec: JobSpec) -> None:
    """Raises ``SpecRefused`` for a combination that could have no effect or a harmful one."""
    precision = spec.training.precision
    pointer = "/training/precision"
    if precision.communication != "fp32" and spec.resources.gpus == 1:
        raise SpecRefused(
            "one GPU communicates with nobody, so this would have no effect; leave it at fp32",
            pointer=f"{pointer}/communication",
        )
    if precision.master_weights == "fp32" and precision.weights == "fp32":
        raise SpecRefused(
            "fp32 weights are their own master copy; ask for bf16 weights or for none",
            pointer=f"{pointer}/master_weights",
        )
    autocast = getattr(spec.recipe, "dtype", None)  # only amp has one
    if autocast == "fp32" and precision.weights != "fp32":
        raise SpecRefused(
            "amp in fp32 computes in the dtype of the weights, which must then be fp32",
            pointer=f"{pointer}/weights",
        )
    if autocast == "fp16":
        for field in ("weights", "gradients"):
            if getattr(precision, field) != "fp32":
                raise SpecRefused(
                    f"fp16 with its loss scale needs {field} in fp32", pointer=f"{pointer}/{field}"
                )


def set_gradient_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Has autograd keep and accumulate the gradient of every trainable parameter in ``dtype``."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.grad_dtype = dtype
