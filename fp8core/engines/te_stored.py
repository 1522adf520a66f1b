"""Frozen weights that lie in FP8, as Transformer Engine's GEMMs read them: no cast, no copy.

A module is given the `Float8Weight` as a weight of high precision, and asks the quantizer of its
weights for the cast. In its place it gets the very codes, row-wise alone. So the forward pass saves
nothing of its own for the backward pass; that one finds no column-wise copy, which dgrad needs
before Blackwell, makes it for this one GEMM and drops it with all else of the layer's pass. The
quantizer sees no amax: under delayed scaling the history of the weight stays empty, and its scale
what it was at the beginning, of which nothing makes use.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8core.numerics.float8_weight import Float8Weight

__all__ = ["stored_for_gemms", "values_of"]


def stored_for_gemms(weight: Float8Weight) -> Any:
    """A ``Float8TensorStorage`` over the codes, new at each call: modules empty it when they save
    it for their backward pass."""
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import (
        Float8TensorStorage,
    )
    from transformer_engine_torch import DType

    codes = weight.codes
    if not codes.is_contiguous():
        raise ValueError(f"the codes of {weight!r} do not lie row after row")
    return Float8TensorStorage(
        data=codes.view(torch.uint8),
        fp8_scale_inv=weight.scale_inverse.reshape(1),
        fp8_dtype=DType.kFloat8E4M3,
        fake_dtype=weight.dtype,
    )


def values_of(weight: Any) -> Any:
    """What a GEMM of high precision is to be given: its kernels know nothing of `Float8Weight`."""
    return weight.dequantize() if isinstance(weight, Float8Weight) else weight
