"""Several Parameters as one matrix, without a copy: their values lie one after another in memory.

The Parameter objects stay what they were, under their names, in the optimizer and in checkpoints.
Where something has moved them since (``model.to``), they are concatenated at each use instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.numerics.float8_weight import Float8Weight, joined_again

__all__ = ["join", "lay_together", "lie_together"]


def lay_together(parameters: Sequence[nn.Parameter]) -> None:
    """Moves the values into one new storage, in this order along the first dimension."""
    if len(parameters) < 2 or lie_together(parameters):
        return
    with torch.no_grad():
        values = torch.cat([parameter.detach() for parameter in parameters])
    begin = 0
    for parameter in parameters:
        end = begin + parameter.shape[0]
        parameter.data = values[begin:end]
        begin = end


def lie_together(tensors: Sequence[Tensor]) -> bool:
    """Whether the values follow one another without a gap, so that a view can show them all."""
    first = tensors[0]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    size = first.element_size()
    expected = first.data_ptr()
    whole = sum(tensor.numel() for tensor in tensors) * size
    if first.untyped_storage().nbytes() - first.storage_offset() * size < whole:
        return False
    for tensor in tensors:
        if tensor.data_ptr() != expected or tensor.dtype != first.dtype:
            return False
        if tensor.shape[1:] != first.shape[1:]:
            return False
        expected += tensor.numel() * size
    return True


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors concatenated along the first dimension: a view where they lie together."""
    if len(tensors) == 1:
        return tensors[0]
    stored = [tensor for tensor in tensors if isinstance(tensor, Float8Weight)]
    if len(stored) == len(tensors):
        return joined_again(stored)
    joined: Tensor = _Join.apply(*tensors)  # type: ignore[no-untyped-call]
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.extents = [tensor.shape[0] for tensor in tensors]
        if not lie_together(tensors):
            return torch.cat(tensors)
        first = tensors[0]
        shape = (sum(ctx.extents), *first.shape[1:])
        return first.detach().as_strided(shape, first.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].split(ctx.extents)
