"""``act(gate) * up`` of one joined product, in one kernel; and the way back in one.

Imported where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.fusion.parts import GatedActivation

__all__ = ["gated"]

_BLOCK = 2048
_WARPS = 4
# GELU in its tanh approximation is x * sigmoid(2 * _STEEP * (x + _CUBIC * x ** 3)).
_STEEP = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)


def gated(joined: Tensor, activation: GatedActivation) -> Tensor:
    """[..., n] of ``joined`` [..., 2 n], gate before up; computed in fp32, in its dtype."""
    found: Tensor = _Gated.apply(joined, activation == "swiglu")  # type: ignore[no-untyped-call]
    return found


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, silu: bool) -> Tensor:
        joined = joined.contiguous()
        product = joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)
        _launch(joined, product, joined, silu=silu, backward=False)
        ctx.save_for_backward(joined)
        ctx.silu = silu
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (joined,) = ctx.saved_tensors
        found = torch.empty_like(joined)
        _launch(joined, gradients[0].contiguous(), found, silu=ctx.silu, backward=True)
        return found, None


def _launch(joined: Tensor, product: Tensor, found: Tensor, *, silu: bool, backward: bool) -> None:
    width = product.shape[-1]
    if product.numel() == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(width))
    _gated[(product.numel() // width, triton.cdiv(width, block))](
        joined,
        product,
        found,
        width,
        BLOCK=block,
        SILU=silu,
        BACKWARD=backward,
        num_warps=_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _gated(  # type: ignore[no-untyped-def]
    joined,
    product,
    found,
    width,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_places = row * 2 * width + column
    gate = tl.load(joined + gate_places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + gate_places + width, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        share = tl.sigmoid(gate)
        steepness = 1.0
    else:
        share = tl.sigmoid(2.0 * _STEEP * (gate + _CUBIC * gate * gate * gate))
        steepness = 2.0 * _STEEP * (1.0 + 3.0 * _CUBIC * gate * gate)
    active = gate * share
    kind = found.dtype.element_ty
    places = row * width + column
    if BACKWARD:
        above = tl.load(product + places, mask=inside, other=0.0).to(tl.float32)
        slope = share + active * (1.0 - share) * steepness
        tl.store(found + gate_places, (above * up * slope).to(kind), mask=inside)
        tl.store(found + gate_places + width, (above * active).to(kind), mask=inside)
    else:
        tl.store(product + places, (active * up).to(kind), mask=inside)
