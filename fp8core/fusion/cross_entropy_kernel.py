"""Cross-entropy of logits as they are, in one reading of them; the gradient is written over them.

Nothing of the logits' size is made beside them, in neither direction. Imported where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sum_of_cross_entropies"]

_BLOCK = 4096
_WARPS = 8
_LEAST = tl.constexpr(-3.0e38)  # below all logits but minus infinity, from which it is finite away


def sum_of_cross_entropies(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Nats, fp32, 0-dim. ``logits`` [..., classes] are lost once the backward pass has begun.

    NaN where a logit is not finite, or a target is no class.
    """
    found: Tensor = _CrossEntropies.apply(logits, targets, ignored)  # type: ignore[no-untyped-call]
    return found


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        logits, targets = logits.contiguous(), targets.contiguous()
        classes = logits.shape[-1]
        losses = torch.empty(targets.numel(), dtype=torch.float32, device=logits.device)
        sums = torch.empty_like(losses)
        if losses.numel():
            _forward[(losses.numel(),)](
                logits,
                targets,
                losses,
                sums,
                classes,
                ignored,
                BLOCK=min(_BLOCK, triton.next_power_of_2(classes)),
                num_warps=_WARPS,
            )
        ctx.save_for_backward(logits, targets, sums)
        ctx.ignored = ignored
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, targets, sums = ctx.saved_tensors
        classes = logits.shape[-1]
        block = min(_BLOCK, triton.next_power_of_2(classes))
        if targets.numel():
            _backward[(targets.numel(), triton.cdiv(classes, block))](
                logits,
                targets,
                sums,
                gradients[0].float(),
                classes,
                ctx.ignored,
                BLOCK=block,
                num_warps=_WARPS,
            )
        return logits, None, None


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _forward(  # type: ignore[no-untyped-def]
    logits, targets, losses, sums, classes, ignored, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * classes
    target = tl.load(targets + row)
    if target == ignored:
        tl.store(losses + row, 0.0)
        tl.store(sums + row, 0.0)
    else:
        largest = _LEAST
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for begin in range(0, classes, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < classes
            values = tl.load(own + column, mask=inside, other=-float("inf")).to(tl.float32)
            larger = tl.maximum(largest, tl.max(values, 0))
            total = total * tl.exp(largest - larger) + tl.exp(values - larger)
            largest = larger
        logarithm = largest + tl.log(tl.sum(total, 0))
        is_class = (target >= 0) & (target < classes)
        chosen = tl.load(own + target, mask=is_class, other=float("nan")).to(tl.float32)
        tl.store(losses + row, logarithm - chosen)
        tl.store(sums + row, logarithm)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    logits, targets, sums, factor, classes, ignored, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < classes
    own = logits + row * classes + column
    target = tl.load(targets + row)
    if target == ignored:
        tl.store(own, tl.zeros([BLOCK], dtype=logits.dtype.element_ty), mask=inside)
    else:
        values = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        share = tl.exp(values - tl.load(sums + row))
        share = tl.where(column == target, share - 1.0, share)
        slope = share * tl.load(factor)
        tl.store(own, slope.to(logits.dtype.element_ty), mask=inside)
