"""The kernel of `cast_figures`: one reading of a tensor, one launch. Imported where Triton is."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp8core.engines.cast_figures import BLOCK, CastRule, ScaleFrom

__all__ = ["count_casts"]

_TILE = BLOCK
_ROWS = 16
_GIVEN = tl.constexpr(int(ScaleFrom.GIVEN))
_TENSOR = tl.constexpr(int(ScaleFrom.TENSOR))
_ROW_BLOCKS = tl.constexpr(int(ScaleFrom.ROW_BLOCKS))
_AMAX_ONLY = tl.constexpr(-1)
_LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)


def count_casts(values: Tensor, rule: CastRule, scale: Tensor | None, row: Tensor) -> None:
    """Adds the figures of ``values`` (``[rows, columns]``, contiguous) to ``row`` (int32 ``[4]``).

    ``scale``: fp32, one number, for `ScaleFrom.GIVEN`. Only enqueues.
    """
    rows, columns = values.shape
    common: dict[str, Any] = {"POWER_OF_TWO": rule.power_of_two, "TILE": _TILE, "num_warps": 8}
    numbers = (rows, columns, rule.largest, rule.limit, rule.vanishing, rule.smallest_amax)
    if rule.scale_from is ScaleFrom.ROWS:
        _count_rows[(triton.cdiv(rows, _ROWS),)](values, row, *numbers, ROWS=_ROWS, **common)
        return
    grid = (triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE),)
    if rule.scale_from is ScaleFrom.TENSOR:
        _count[grid](values, row, row, *numbers, SCALES=-1, **common)
    made_from = row if scale is None else scale
    _count[grid](values, made_from, row, *numbers, SCALES=int(rule.scale_from), **common)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _made_scale(amax, largest, smallest_amax, POWER_OF_TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    amax = tl.maximum(amax, smallest_amax)
    scale = tl.minimum(tl.div_rn(largest, amax), _LARGEST_FP32)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)
    return tl.where((amax > 0) & (amax <= _LARGEST_FP32), scale, 1.0)


@triton.jit(do_not_specialize=["largest", "limit", "vanishing", "smallest_amax"])  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    values,
    scale_from,
    row,
    rows,
    columns,
    largest,
    limit,
    vanishing,
    smallest_amax,
    SCALES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    across = tl.cdiv(columns, TILE)
    tile = tl.program_id(0)
    down = (tile // across) * TILE + tl.arange(0, TILE)
    right = (tile % across) * TILE + tl.arange(0, TILE)
    inside = (down < rows)[:, None] & (right < columns)[None, :]
    places = down.to(tl.int64)[:, None] * columns + right[None, :]
    magnitudes = tl.abs(tl.load(values + places, mask=inside, other=0.0).to(tl.float32))
    # Their order as integers is that of the magnitudes, with NaN above infinity: it is kept.
    amax_bits = tl.max(tl.max(magnitudes.to(tl.int32, bitcast=True), axis=1), axis=0)
    if SCALES != _TENSOR:
        tl.atomic_max(row, amax_bits)
    if SCALES != _AMAX_ONLY:
        if SCALES == _GIVEN:
            scale = tl.load(scale_from)
            if tile == 0:
                tl.store(row + 1, scale.to(tl.int32, bitcast=True))
        elif SCALES == _TENSOR:
            amax = tl.load(row).to(tl.float32, bitcast=True)
            scale = _made_scale(amax, largest, smallest_amax, POWER_OF_TWO)
            if tile == 0:
                tl.atomic_min(row + 1, scale.to(tl.int32, bitcast=True))
        elif SCALES == _ROW_BLOCKS:
            amaxes = tl.max(magnitudes, axis=1)
            scales = _made_scale(amaxes, largest, smallest_amax, POWER_OF_TWO)
            # Rows beyond the tensor have scale 1, which must not count as the least.
            seen = tl.where(down < rows, scales, float("inf"))
            tl.atomic_min(row + 1, tl.min(seen, axis=0).to(tl.int32, bitcast=True))
            scale = scales[:, None]
        else:
            amax = tl.max(tl.max(magnitudes, axis=1), axis=0)
            scale = _made_scale(amax, largest, smallest_amax, POWER_OF_TWO)
            tl.atomic_min(row + 1, scale.to(tl.int32, bitcast=True))
        scaled = magnitudes * scale
        saturated = (scaled > limit).to(tl.int32)
        underflow = ((magnitudes > 0) & (scaled <= vanishing)).to(tl.int32)
        tl.atomic_add(row + 2, tl.sum(tl.sum(saturated, axis=1), axis=0))
        tl.atomic_add(row + 3, tl.sum(tl.sum(underflow, axis=1), axis=0))


@triton.jit(do_not_specialize=["largest", "limit", "vanishing", "smallest_amax"])  # type: ignore[untyped-decorator]
def _count_rows(  # type: ignore[no-untyped-def]
    values,
    row,
    rows,
    columns,
    largest,
    limit,
    vanishing,
    smallest_amax,
    ROWS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    down = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    starts = values + down.to(tl.int64)[:, None] * columns
    right = tl.arange(0, TILE)
    bits = tl.zeros((ROWS,), dtype=tl.int32)
    for left in range(0, columns, TILE):
        inside = (down < rows)[:, None] & (left + right < columns)[None, :]
        loaded = tl.load(starts + left + right[None, :], mask=inside, other=0.0)
        magnitudes = tl.abs(loaded.to(tl.float32))
        bits = tl.maximum(bits, tl.max(magnitudes.to(tl.int32, bitcast=True), axis=1))
    amaxes = bits.to(tl.float32, bitcast=True)
    scales = _made_scale(amaxes, largest, smallest_amax, POWER_OF_TWO)
    saturated = tl.zeros((ROWS, TILE), dtype=tl.int32)
    underflow = tl.zeros((ROWS, TILE), dtype=tl.int32)
    for left in range(0, columns, TILE):
        inside = (down < rows)[:, None] & (left + right < columns)[None, :]
        loaded = tl.load(starts + left + right[None, :], mask=inside, other=0.0)
        magnitudes = tl.abs(loaded.to(tl.float32))
        scaled = magnitudes * scales[:, None]
        saturated += (scaled > limit).to(tl.int32)
        underflow += ((magnitudes > 0) & (scaled <= vanishing)).to(tl.int32)
    tl.atomic_max(row, tl.max(bits, axis=0))
    seen = tl.where(down < rows, scales, float("inf"))
    tl.atomic_min(row + 1, tl.min(seen, axis=0).to(tl.int32, bitcast=True))
    tl.atomic_add(row + 2, tl.sum(tl.sum(saturated, axis=1), axis=0))
    tl.atomic_add(row + 3, tl.sum(tl.sum(underflow, axis=1), axis=0))
