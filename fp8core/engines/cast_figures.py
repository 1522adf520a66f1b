"""What casts to FP8 do to tensors: amax, scale, saturated, underflow, counted in one reading.

An element saturates where ``|x * scale|`` exceeds the format's largest number, and underflows where
it is non-zero and ``|x * scale|`` is at most half of the smallest subnormal, which
round-to-nearest-even sends to zero. On a GPU one Triton kernel reads each tensor once (twice where
the scale follows from the tensor's own amax) and adds up in integers, so that the figures are
exact and do not depend on the order of its blocks; many tensors of one rule are one launch (or two)
as well. Plain torch operations, on a CPU and where Triton is missing, give the same figures.

Scales made at the cast follow Transformer Engine's ``compute_scale_from_amax``
(``common/recipe/recipe_common.cuh``): ``FP8_MAX / amax``, 1 where the amax is 0 or not finite, the
largest fp32 where that overflows, and its mantissa cut off where scales are powers of two.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.landing import Landing

__all__ = ["FIGURES", "CastFigures", "CastRule", "ScaleFrom"]

FIGURES = ("amax", "scale", "saturated", "underflow")
BLOCK = 128
"""Side of the blocks of `ScaleFrom.ROW_BLOCKS` and `ScaleFrom.TILES`."""
_INFINITY = 0x7F800000
_UNCOUNTED = -1
_LARGEST_FP32 = torch.finfo(torch.float32).max


class ScaleFrom(IntEnum):
    """Where the scale of a cast comes from."""

    GIVEN = 0  # made before: delayed scaling
    TENSOR = 1  # from the tensor's amax (of one that is cast several times, the largest so far)
    ROW_BLOCKS = 2  # one for each 1 x 128 block of the last dimension
    TILES = 3  # one for each 128 x 128 tile of the last two
    ROWS = 4  # one for each row of the last dimension


@dataclass(frozen=True)
class CastRule:
    """How a tensor is cast: the format's largest number, the largest magnitude that becomes zero,
    and its scales."""

    largest: float
    vanishing: float
    scale_from: ScaleFrom
    power_of_two: bool = False
    smallest_amax: float = 0.0
    """What an amax counts as at least, when a scale is made from it."""

    @staticmethod
    def of(fp8_format: str, scale_from: ScaleFrom, *, power_of_two: bool = False) -> CastRule:
        """``fp8_format``: ``e4m3`` or ``e5m2``."""
        largest, vanishing = {"e4m3": (448.0, 2.0**-10), "e5m2": (57344.0, 2.0**-17)}[fp8_format]
        return CastRule(largest, vanishing, scale_from, power_of_two)

    @property
    def limit(self) -> float:
        """What a saturated element exceeds. With a scale made from it, the largest element may come
        out an ulp above ``largest``, which the cast rounds back to it."""
        return self.largest if self.scale_from is ScaleFrom.GIVEN else self.largest * (1 + 2**-20)


class CastFigures:
    """The figures of ``names``, a row for each. A tensor cast several times is taken together: the
    largest amax, the fractions over all elements, and of scales the last given or least made."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        self._keys = [[f"{name}/{figure}" for figure in FIGURES] for name in names]
        self._elements = [0] * len(names)
        self._uncounted: tuple[int, ...] = ()
        self._uncounted_rows = torch.empty(0, dtype=torch.int64, device=device)
        # int32: the bits of amax and scale (ordered like the numbers, as none is negative; NaN
        # is above infinity), then the two counts.
        self._start = torch.tensor([0, _INFINITY, 0, 0], dtype=torch.int32, device=device)
        self._bits = self._start.repeat(len(names), 1)
        self._views = list(self._bits.unbind())
        self._count, self._count_many = _counters(device.type)

    def clear(self) -> None:
        """Forgets all; the device is not waited for."""
        self._elements = [0] * len(self._elements)
        self._bits.copy_(self._start)

    def counted(self) -> list[int]:
        """How many elements of each name were added since `clear`."""
        return list(self._elements)

    def count_as(self, elements: Sequence[int]) -> None:
        """Say so much was added as `counted` told: by kernels that are enqueued once more."""
        self._elements = list(elements)

    def add(self, name: str, tensor: Tensor, rule: CastRule, scale: Tensor | None = None) -> None:
        """Count the cast of ``tensor`` (fp32, bf16 or fp16, any shape). ``scale``: one fp32 number
        on the same device, for `ScaleFrom.GIVEN` alone."""
        if tensor.numel() == 0:
            return
        row = self._rows[name]
        self._elements[row] += tensor.numel()
        flat = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        self._count(flat.contiguous(), rule, scale, self._views[row])

    def add_all(self, tensors: Mapping[str, Tensor], rule: CastRule) -> None:
        """`add` for each of ``tensors``, by name, in as few launches as one of them takes.

        Their scales are made from them: ``rule`` is not of `ScaleFrom.GIVEN`."""
        if rule.scale_from is ScaleFrom.GIVEN:
            raise ValueError("tensors cast with given scales are added one by one, by `add`")
        values, rows = [], []
        for name, tensor in tensors.items():
            if tensor.numel():
                row = self._rows[name]
                self._elements[row] += tensor.numel()
                values.append(tensor.detach().contiguous())
                rows.append(row)
        if values:
            self._count_many(values, rule, self._bits, rows)

    def set_uncounted(self, names: Sequence[str], amaxes: Tensor, scales: Tensor) -> None:
        """Amax and scale (fp32, one for each name) of tensors that exist inside of kernels only,
        where nothing can be counted."""
        places = tuple(self._rows[name] for name in names)
        for row in places:
            self._elements[row] = _UNCOUNTED
        if places != self._uncounted:
            self._uncounted = places
            self._uncounted_rows = torch.tensor(places, device=self._bits.device)
        known = torch.stack([amaxes, scales], dim=1).view(torch.int32)
        self._bits[:, :2].index_copy_(0, self._uncounted_rows, known)

    def read_later(self) -> Callable[[], dict[str, float]]:
        """A function that waits for ``<name>/<figure>`` of all names that have figures."""
        landing = Landing([self._bits])
        elements = list(self._elements)

        def read() -> dict[str, float]:
            (bits,) = landing.wait()
            floats, counts = bits.view(torch.float32)[:, :2].tolist(), bits[:, 2:].tolist()
            figures: dict[str, float] = {}
            rows = zip(self._keys, elements, floats, counts, strict=True)
            for (amax, scale, saturated, underflow), number, (a, s), (over, under) in rows:
                if number:
                    figures[amax], figures[scale] = a, s
                if number > 0:
                    figures[saturated], figures[underflow] = over / number, under / number
            return figures

        return read


_Count = Callable[[Tensor, CastRule, Tensor | None, Tensor], None]
"""(values ``[rows, columns]``, rule, scale, the row of figures to add to)"""
_CountMany = Callable[[Sequence[Tensor], CastRule, Tensor, Sequence[int]], None]
"""(contiguous tensors of any shape, rule, all rows of figures, the one each tensor adds to)"""


@functools.cache
def _counters(device_type: str) -> tuple[_Count, _CountMany]:
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        from fp8core.engines.cast_figures_kernel import count_casts, count_casts_of_many

        return count_casts, count_casts_of_many
    return count_with_torch, count_many_with_torch


def count_many_with_torch(
    tensors: Sequence[Tensor], rule: CastRule, figures: Tensor, rows: Sequence[int]
) -> None:
    for tensor, row in zip(tensors, rows, strict=True):
        values = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        count_with_torch(values, rule, None, figures[row])


def count_with_torch(values: Tensor, rule: CastRule, scale: Tensor | None, row: Tensor) -> None:
    """What the kernel does, in torch's own operations."""
    magnitudes = values.abs().float()
    floats = row[:2].view(torch.float32)
    # torch.maximum passes a NaN on.
    floats[0] = torch.maximum(floats[0], magnitudes.amax())
    if rule.scale_from is ScaleFrom.GIVEN:
        assert scale is not None
        scales: Any = scale.float()
    elif rule.scale_from is ScaleFrom.TENSOR:
        scales = scale_of(floats[0], rule)
    elif rule.scale_from is ScaleFrom.ROWS:
        scales = scale_of(magnitudes.amax(dim=1, keepdim=True), rule)
    else:
        side = BLOCK if rule.scale_from is ScaleFrom.TILES else 1
        scales = _per_block(scale_of(_block_amaxes(magnitudes, side), rule), values.shape, side)
    scaled = magnitudes * scales
    least = scales.amin()
    given = rule.scale_from is ScaleFrom.GIVEN
    floats[1] = least if given else torch.minimum(floats[1], least)
    row[2] += torch.count_nonzero(scaled > rule.limit)
    row[3] += torch.count_nonzero((magnitudes > 0) & (scaled <= rule.vanishing))


def scale_of(amaxes: Tensor, rule: CastRule) -> Tensor:
    """The scales (fp32) that casts make from ``amaxes`` (fp32, any shape)."""
    amaxes = amaxes.clamp(min=rule.smallest_amax)
    scales = torch.clamp(torch.full_like(amaxes, rule.largest) / amaxes, max=_LARGEST_FP32)
    if rule.power_of_two:
        scales = (scales.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    usable = (amaxes > 0) & (amaxes < float("inf"))
    return torch.where(usable, scales, torch.ones_like(scales))


def _block_amaxes(magnitudes: Tensor, side: int) -> Tensor:
    """The amaxes ``[ceil(rows / side), ceil(columns / 128)]`` of blocks, cut short at edges."""
    rows, columns = magnitudes.shape
    padded = torch.nn.functional.pad(magnitudes, (0, -columns % BLOCK, 0, -rows % side))
    blocks = padded.view(padded.shape[0] // side, side, padded.shape[1] // BLOCK, BLOCK)
    return blocks.amax(dim=(1, 3))


def _per_block(scales: Tensor, shape: torch.Size, side: int) -> Tensor:
    spread = scales.repeat_interleave(side, dim=0).repeat_interleave(BLOCK, dim=1)
    return spread[: shape[0], : shape[1]]
