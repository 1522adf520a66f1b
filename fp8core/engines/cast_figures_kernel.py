"""The kernels of `cast_figures`: one reading of a tensor, or of many, in one launch.

Many are found over a table of their addresses. Imported where Triton is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.engines.cast_figures import BLOCK, CastRule, ScaleFrom

__all__ = ["count_casts", "count_casts_of_many"]

_TILE = BLOCK
_ROWS = 16
_GIVEN = tl.constexpr(int(ScaleFrom.GIVEN))
_TENSOR = tl.constexpr(int(ScaleFrom.TENSOR))
_ROW_BLOCKS = tl.constexpr(int(ScaleFrom.ROW_BLOCKS))
_AMAX_ONLY = tl.constexpr(-1)
_LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)
_LOADED_TOGETHER = 16  # bytes, and a multiple of it in elements
_COLUMNS = tl.constexpr(5)
_FIGURES = tl.constexpr(4)


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


def count_casts_of_many(
    tensors: Sequence[Tensor], rule: CastRule, figures: Tensor, rows: Sequence[int]
) -> None:
    """Adds the figures of each of ``tensors`` (contiguous, not empty) to its row of ``figures``
    (int32 ``[any, 4]``, contiguous). Scales are made from the tensors. Only enqueues."""
    by_rows = rule.scale_from is ScaleFrom.ROWS
    alike: dict[torch.dtype, list[tuple[int, int, int, int]]] = {}
    kinds: dict[torch.dtype, Tensor] = {}
    for tensor, row in zip(tensors, rows, strict=True):
        columns = tensor.shape[-1] if tensor.dim() else 1
        extent = (tensor.data_ptr(), tensor.numel() // columns, columns, row)
        alike.setdefault(tensor.dtype, []).append(extent)
        kinds[tensor.dtype] = tensor
    numbers = (rule.largest, rule.limit, rule.vanishing, rule.smallest_amax)
    for dtype, extents in alike.items():
        table, owners, aligned = _table(tuple(extents), by_rows, figures.device)
        given = (table, owners, kinds[dtype], figures, *numbers)
        common: dict[str, Any] = {"POWER_OF_TWO": rule.power_of_two, "ALIGNED": aligned}
        common |= {"TILE": _TILE, "num_warps": 8}
        grid = (owners.numel(),)
        if by_rows:
            _count_rows_of_many[grid](*given, ROWS=_ROWS, **common)
            continue
        if rule.scale_from is ScaleFrom.TENSOR:
            _count_many[grid](*given, SCALES=-1, **common)
        _count_many[grid](*given, SCALES=int(rule.scale_from), **common)


@functools.lru_cache(maxsize=16)
def _table(
    extents: tuple[tuple[int, int, int, int], ...], by_rows: bool, device: torch.device
) -> tuple[Tensor, Tensor, bool]:
    """Of tensors told by address, rows, columns and row of figures: all that and the first of its
    programs, int64 [tensors, `_COLUMNS`]; the tensor that each program works at, int32 [programs];
    and whether elements can be read 16 bytes at a time. Kept for the tensors' next count."""
    lines, programs, begin, aligned = [], [], 0, True
    for place, rows, columns, row in extents:
        aligned &= not (place % _LOADED_TOGETHER or columns % _LOADED_TOGETHER)
        lines.append([place, rows, columns, row, begin])
        tiles = triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE)
        programs.append(triton.cdiv(rows, _ROWS) if by_rows else tiles)
        begin += programs[-1]
    numbers = torch.arange(len(lines), dtype=torch.int32)
    table = torch.tensor(lines, dtype=torch.int64)
    owners = numbers.repeat_interleave(torch.tensor(programs))
    if device.type == "cuda":
        table, owners = table.pin_memory(), owners.pin_memory()
    return (
        table.to(device, non_blocking=True),
        owners.to(device, non_blocking=True),
        aligned,
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _made_scale(amax, largest, smallest_amax, POWER_OF_TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    amax = tl.maximum(amax, smallest_amax)
    scale = tl.minimum(tl.div_rn(largest, amax), _LARGEST_FP32)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)
    return tl.where((amax > 0) & (amax <= _LARGEST_FP32), scale, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _count_tile(  # type: ignore[no-untyped-def]
    tile,
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


@triton.jit  # type: ignore[untyped-decorator]
def _count_some_rows(  # type: ignore[no-untyped-def]
    some,
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
    down = some * ROWS + tl.arange(0, ROWS)
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


_FROM_THE_RULE = ["largest", "limit", "vanishing", "smallest_amax"]


@triton.jit(do_not_specialize=_FROM_THE_RULE)  # type: ignore[untyped-decorator]
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
    tile = tl.program_id(0)
    _count_tile(
        tile,
        values,
        scale_from,
        row,
        rows,
        columns,
        largest,
        limit,
        vanishing,
        smallest_amax,
        SCALES,
        POWER_OF_TWO,
        TILE,
    )


@triton.jit(do_not_specialize=_FROM_THE_RULE)  # type: ignore[untyped-decorator]
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
    some = tl.program_id(0)
    _count_some_rows(
        some,
        values,
        row,
        rows,
        columns,
        largest,
        limit,
        vanishing,
        smallest_amax,
        ROWS,
        POWER_OF_TWO,
        TILE,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _owned(table, owners, of_values, figures, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tensor this program works at, its extent, its row of figures, and which of the tensor's
    programs this is. ``of_values`` tells the tensors' format alone."""
    program = tl.program_id(0)
    line = table + tl.load(owners + program).to(tl.int64) * _COLUMNS
    values = tl.load(line).to(of_values.dtype)
    rows = tl.load(line + 1).to(tl.int32)
    columns = tl.load(line + 2).to(tl.int32)
    row = figures + tl.load(line + 3) * _FIGURES
    if ALIGNED:
        values = tl.multiple_of(values, 16)
        columns = tl.multiple_of(columns, 16)
    own = program - tl.load(line + 4).to(tl.int32)
    return values, rows, columns, row, own


@triton.jit(do_not_specialize=_FROM_THE_RULE)  # type: ignore[untyped-decorator]
def _count_many(  # type: ignore[no-untyped-def]
    table,
    owners,
    of_values,
    figures,
    largest,
    limit,
    vanishing,
    smallest_amax,
    SCALES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    values, rows, columns, row, tile = _owned(table, owners, of_values, figures, ALIGNED)
    _count_tile(
        tile,
        values,
        row,
        row,
        rows,
        columns,
        largest,
        limit,
        vanishing,
        smallest_amax,
        SCALES,
        POWER_OF_TWO,
        TILE,
    )


@triton.jit(do_not_specialize=_FROM_THE_RULE)  # type: ignore[untyped-decorator]
def _count_rows_of_many(  # type: ignore[no-untyped-def]
    table,
    owners,
    of_values,
    figures,
    largest,
    limit,
    vanishing,
    smallest_amax,
    ROWS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    values, rows, columns, row, some = _owned(table, owners, of_values, figures, ALIGNED)
    _count_some_rows(
        some,
        values,
        row,
        rows,
        columns,
        largest,
        limit,
        vanishing,
        smallest_amax,
        ROWS,
        POWER_OF_TWO,
        TILE,
    )
