"""RMSNorm and LayerNorm, each in one kernel forward and one backward. Imported where Triton is.

As a model's own operations a norm is several passes over its input, some of them in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.engines.protocol import NormDescription

__all__ = ["normalised", "takes"]

_TILE = 4096
"""Elements of the rows that a program has in registers at a time, where rows are shorter."""
_WIDEST = 32768


def takes(norm: NormDescription) -> bool:
    """Whether the kernels compute this norm."""
    return (
        norm.weight is not None
        and norm.weight.is_cuda
        and len(norm.normalized_shape) == 1
        and norm.normalized_shape[0] <= _WIDEST
    )


def normalised(x: Tensor, norm: NormDescription, dtype: torch.dtype) -> Tensor:
    """``norm`` of ``x`` [..., width], computed in fp32, in ``dtype``."""
    found: Tensor = _Normalised.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, norm.eps, norm.kind == "layer_norm", norm.zero_centered, dtype
    )
    return found


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        zero_centred_weight: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.contiguous()
        rows, tile = _tiles(x)
        output = torch.empty_like(x, dtype=dtype)
        # What each row is divided by, inverted, and its mean.
        statistics = torch.empty(2 if centred else 1, rows, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, statistics)
        ctx.centred, ctx.zero_centred_weight = centred, zero_centred_weight
        ctx.bias_dtype = None if bias is None else bias.dtype
        if rows:
            _forward[(triton.cdiv(rows, tile["ROWS"]),)](
                x,
                output,
                weight,
                weight if bias is None else bias,
                statistics,
                rows,
                eps,
                **tile,
                CENTRED=centred,
                PLUS_ONE=zero_centred_weight,
                BIASED=bias is not None,
            )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, statistics = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        rows, tile = _tiles(x)
        biased = ctx.bias_dtype is not None
        weighted = any(ctx.needs_input_grad[1:3])
        programs = max(1, min(triton.cdiv(rows, tile["ROWS"]), _programs(x.device)))
        found = torch.empty_like(x)
        # Each program adds up rows of its own, always in the same order.
        partial = x.new_zeros(2 if biased else 1, programs, x.shape[-1], dtype=torch.float32)
        if rows:
            _backward[(programs,)](
                x,
                gradient,
                found,
                weight,
                statistics,
                partial,
                rows,
                **tile,
                CENTRED=ctx.centred,
                PLUS_ONE=ctx.zero_centred_weight,
                WEIGHTED=weighted,
                BIASED=biased,
            )
        of_weight = of_bias = None
        if weighted:
            sums = partial.sum(1)
            of_weight = sums[0].to(weight.dtype)
            of_bias = sums[1].to(ctx.bias_dtype) if biased else None
        return found, of_weight, of_bias, None, None, None, None


def _tiles(x: Tensor) -> tuple[int, dict[str, int]]:
    """How many rows ``x`` has, and how the kernels are to go through them."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    together = max(1, _TILE // block)
    warps = min(16, max(4, block * together // 512))
    return x.numel() // max(1, width), {
        "WIDTH": width,
        "BLOCK": block,
        "ROWS": together,
        "num_warps": warps,
    }


@functools.cache
def _programs(device: torch.device) -> int:
    """Some for each of the device's processors, to hide one another's waits."""
    if device.type != "cuda":
        return 4
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _forward(  # type: ignore[no-untyped-def]
    x,
    output,
    weight,
    bias,
    statistics,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BIASED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    places = row[:, None] * WIDTH + column[None, :]
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(values, 1) / WIDTH
        tl.store(statistics + rows + row, mean, mask=row < rows)
        values = tl.where(inside, values - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / WIDTH + eps)
    tl.store(statistics + row, scale, mask=row < rows)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    values = values * scale[:, None] * factor[None, :]
    if BIASED:
        added = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        values += added[None, :]
    tl.store(output + places, values.to(output.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    x,
    gradient,
    found,
    weight,
    statistics,
    partial,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    of_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        places = row[:, None] * WIDTH + column[None, :]
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(statistics + row, mask=row < rows, other=0.0)
        if CENTRED:
            mean = tl.load(statistics + rows + row, mask=row < rows, other=0.0)
            values = tl.where(inside, values - mean[:, None], 0.0)
        unit = values * scale[:, None]
        weighted = above * factor[None, :]
        slope = weighted - unit * (tl.sum(weighted * unit, 1) / WIDTH)[:, None]
        if CENTRED:
            slope -= (tl.sum(weighted, 1) / WIDTH)[:, None]
        slope *= scale[:, None]
        tl.store(found + places, slope.to(found.dtype.element_ty), mask=inside)
        if WEIGHTED:
            of_weight += tl.sum(above * unit, 0)
        if BIASED:
            of_bias += tl.sum(above, 0)
    if WEIGHTED:
        own = partial + program * WIDTH + column
        tl.store(own, of_weight, mask=column < WIDTH)
        if BIASED:
            tl.store(own + tl.num_programs(0) * WIDTH, of_bias, mask=column < WIDTH)
