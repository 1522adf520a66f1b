"""SwiGLU with its cast to FP8, and its gradient with its cast, each in one kernel. Needs Triton.

Transformer Engine writes the gradient in bf16 and reads it again to cast it, with sums for a bias
that is not there. Here both orders of the elements, as GEMMs on Hopper read them, are written from
registers; nothing is rounded between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Cast", "swiglu_gradient_in_fp8", "swiglu_in_fp8"]

_TILE = {"ROWS": 128, "COLUMNS": 64, "num_warps": 8}

Cast = tuple[Tensor, Tensor, Tensor]
"""FP8 as bytes ``[rows, columns]`` and ``[columns, rows]``, and the inverse of the scale [1]."""


def swiglu_in_fp8(
    joined: Tensor, scale: Tensor, amax: Tensor, kind: torch.dtype, *, both: bool
) -> Cast:
    """``silu(joined[:, :n]) * joined[:, n:]`` of ``[rows, 2 * n]`` in the FP8 format ``kind``.

    ``scale`` and ``amax``: fp32, one element; the latter becomes the largest absolute value where
    that is larger. Where not ``both`` orders are wanted, the other's tensor is empty.
    """
    rows, inner = joined.shape[0], joined.shape[1] // 2
    made = _made(rows, inner, joined, both)
    if rows:
        _forward[_grid(rows, inner)](
            joined, made[0].view(kind), made[1].view(kind), scale, made[2], amax, rows, inner,
            BOTH=both, **_TILE,
        )  # fmt: skip
    return made


def swiglu_gradient_in_fp8(
    gradient: Tensor, joined: Tensor, scale: Tensor, amax: Tensor, kind: torch.dtype, *, both: bool
) -> Cast:
    """That of ``joined``, where ``gradient`` ``[rows, n]`` is that of `swiglu_in_fp8`'s output."""
    rows, inner = gradient.shape
    made = _made(rows, 2 * inner, joined, both)
    if rows:
        _backward[_grid(rows, inner)](
            gradient, joined, made[0].view(kind), made[1].view(kind), scale, made[2], amax, rows,
            inner, BOTH=both, **_TILE,
        )  # fmt: skip
    return made


def _made(rows: int, columns: int, like: Tensor, both: bool) -> Cast:
    def bytes_of(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=like.device)

    inverse = torch.empty(1, dtype=torch.float32, device=like.device)
    return bytes_of(rows, columns), bytes_of(columns if both else 0, rows), inverse


def _grid(rows: int, inner: int) -> tuple[int, int]:
    return triton.cdiv(inner, _TILE["COLUMNS"]), triton.cdiv(rows, _TILE["ROWS"])


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _stored(  # type: ignore[no-untyped-def]
    values, data, other, times, row, column, rows, width, inside, BOTH: tl.constexpr
):
    """Casts a tile and gives its largest absolute value."""
    cast = (values * times).to(data.dtype.element_ty)
    tl.store(data + row[:, None] * width + column[None, :], cast, mask=inside)
    if BOTH:
        turned = column[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(other + turned, tl.trans(cast), mask=tl.trans(inside))
    return tl.max(tl.max(tl.abs(values), 1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _place(inner, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < inner)[None, :]
    return row, column, inside


@triton.jit
def _times(scale, inverse):  # type: ignore[no-untyped-def]
    """The scale; the first program leaves its inverse."""
    times = tl.load(scale)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, tl.math.div_rn(1.0, times))
    return times


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    joined,
    data,
    other,
    scale,
    inverse,
    amax,
    rows,
    inner,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, inside = _place(inner, rows, ROWS, COLUMNS)
    places = row[:, None] * (2 * inner) + column[None, :]
    gate = tl.load(joined + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + places + inner, mask=inside, other=0.0).to(tl.float32)
    values = gate * tl.sigmoid(gate) * up
    times = _times(scale, inverse)
    largest = _stored(values, data, other, times, row, column, rows, inner, inside, BOTH)
    tl.atomic_max(amax, largest, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    gradient,
    joined,
    data,
    other,
    scale,
    inverse,
    amax,
    rows,
    inner,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, inside = _place(inner, rows, ROWS, COLUMNS)
    above = tl.load(gradient + row[:, None] * inner + column[None, :], mask=inside, other=0.0)
    above = above.to(tl.float32)
    width = 2 * inner
    places = row[:, None] * width + column[None, :]
    gate = tl.load(joined + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + places + inner, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = above * up * (share * (1.0 + gate * (1.0 - share)))
    of_up = above * (gate * share)
    times = _times(scale, inverse)
    first = _stored(of_gate, data, other, times, row, column, rows, width, inside, BOTH)
    second = _stored(of_up, data, other, times, row, column + inner, rows, width, inside, BOTH)
    tl.atomic_max(amax, tl.maximum(first, second), sem="relaxed")
