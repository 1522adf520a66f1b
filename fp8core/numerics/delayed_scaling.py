"""Delayed scaling: the scale of a cast comes from the amaxes of earlier steps.

The arithmetic is that of Transformer Engine's fused update kernel
(``transformer_engine/common/recipe/delayed_scaling.cu``, ``kernel_bulk``). For every tensor there
is a history of ``length`` fp32 amaxes, a ring whose row 0 is a staging cell: casts write the
running step's amax there. One update, for a tensor whose staged amax ``a`` is not zero:

1. the amax used is ``a`` (``most_recent``), or the largest of ``a`` and rows 1.. of the history
   (``max``: the window before it turns, so ``length`` entries);
2. the history turns: row 1, the oldest, is dropped, ``a`` becomes the last row, row 0 becomes 0;
3. ``scale = FP8_MAX * 2^-margin / amax`` in fp32 where the amax used is finite and above zero;
   otherwise the scale stays. A scale that overflows fp32 becomes the largest fp32 number.

A tensor whose staged amax is zero (its module did not run, or it held nothing but zeros) is left
as it is. NaN amaxes are dropped by the maximum, an infinite one enters the history and holds the
scale until it leaves it.

``interval`` is ours to define, since TE dropped the field in 2.3: histories turn at every update,
and the scale of a tensor is recomputed at its first update and at every ``interval``-th after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["AmaxHistories", "AmaxHistory", "DelayedScaling", "Scales", "delayed_scale"]

AmaxComputeAlgo = Literal["max", "most_recent"]

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class DelayedScaling:
    """The parameters of delayed scaling for tensors of one FP8 format."""

    fp8_max: float
    margin: int
    amax_history_len: int
    amax_compute_algo: AmaxComputeAlgo
    interval: int

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len must be at least 1, not {self.amax_history_len}")
        if self.interval < 1:
            raise ValueError(f"interval must be at least 1, not {self.interval}")
        if self.margin < 0:
            raise ValueError(f"margin must not be negative, not {self.margin}")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo must be 'max' or 'most_recent', not {self.amax_compute_algo!r}"
            )
        if self.fp8_max * 2.0**-self.margin < torch.finfo(torch.float32).tiny:
            raise ValueError(f"margin {self.margin} is too large: every scale would be zero")

    @property
    def scaled_max(self) -> float:
        """``FP8_MAX * 2^-margin``: where a tensor's amax lands once it is scaled."""
        return self.fp8_max * 2.0**-self.margin


@dataclass(frozen=True)
class Scales:
    """All scales as they stood at one time, each a 0-dim fp32 tensor that never changes.

    ``inverse`` is the factor that undoes ``scale``, rounded to fp32 as a cast kernel stores it.
    """

    scale: tuple[Tensor, ...]
    inverse: tuple[Tensor, ...]


@dataclass(frozen=True)
class AmaxHistory:
    """What delayed scaling remembers of a group of ``n`` tensors.

    ``amax_history``: fp32 ``[length, n]``; ``scale``: fp32 ``[n]``; ``updates``: int64 ``[n]``,
    the updates each tensor took part in (``interval`` counts on it).
    """

    amax_history: Tensor
    scale: Tensor
    updates: Tensor


def delayed_scale(amax: Tensor, previous: Tensor, scaled_max: float) -> Tensor:
    """The new scales for ``amax`` (fp32, any shape), ``previous`` where the amax gives none."""
    usable = torch.isfinite(amax) & (amax > 0)
    # Not `scaled_max / amax`: PyTorch takes that as a reciprocal and a product, rounded twice.
    fresh = torch.where(usable, torch.full_like(amax, scaled_max) / amax, previous)
    return torch.where(torch.isinf(fresh), FLOAT32_MAX, fresh)


class AmaxHistories:
    """The amax histories and scales of many tensors with the same parameters, updated together.

    Tensors are columns, handed out in groups by ``add``. All of them live in one matrix so that
    an update is a handful of operations whatever the number of layers.
    """

    def __init__(self, scaling: DelayedScaling, device: torch.device) -> None:
        self._scaling = scaling
        self._history = torch.zeros(scaling.amax_history_len, 0, device=device)
        self._scale = torch.ones(0, device=device)
        self._updates = torch.zeros(0, dtype=torch.int64, device=device)
        self._staging: tuple[Tensor, ...] | None = None
        self._scales: Scales | None = None

    @property
    def scales(self) -> Scales:
        """The scales to cast with now; what was read before an update keeps its values."""
        if self._scales is None:
            scale = self._scale.clone()
            self._scales = Scales(scale.unbind(), scale.reciprocal().unbind())
        return self._scales

    def add(self, count: int) -> int:
        """Makes ``count`` new columns (history 0, scale 1); returns the first one's index."""
        first = self._scale.numel()
        new = torch.zeros(self._scaling.amax_history_len, count, device=self._history.device)
        self._history = torch.cat([self._history, new], dim=1)
        self._scale = torch.cat([self._scale, torch.ones_like(new[0])])
        self._updates = torch.cat([self._updates, torch.zeros_like(new[0], dtype=torch.int64)])
        self._staging = self._scales = None
        return first

    def record(self, column: int, amax: Tensor) -> None:
        """Stages the amax (0-dim fp32) of one cast; several casts of a step keep the largest."""
        if self._staging is None:
            self._staging = self._history[0].unbind()
        cell = self._staging[column]
        torch.fmax(cell, amax, out=cell)

    def update(self, share: Callable[[Tensor], None] = lambda staged: None) -> None:
        """Turns the histories and recomputes the scales, as the module's text says.

        ``share``: gets the staged amaxes (fp32 ``[n]``) first, to put into their place the largest
        ones of all ranks.
        """
        staged = self._history[0].clone()
        share(staged)
        self._history[0].copy_(staged)
        ran = staged != 0
        if self._scaling.amax_compute_algo == "max":
            # Row 0 is the staged amax itself, so the maximum over all rows is the one wanted.
            # NaN cannot be staged; one in a loaded history is dropped as fmaxf drops it.
            amax = self._history.nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=0)
        else:
            amax = staged
        due = ran & (self._updates % self._scaling.interval == 0)
        fresh = delayed_scale(amax, self._scale, self._scaling.scaled_max)
        self._scale = torch.where(due, fresh, self._scale)
        self._updates += ran
        turned = self._history.roll(-1, dims=0)  # row 1 comes to row 0, the staged row goes last
        turned[0] = 0.0
        self._history.copy_(torch.where(ran, turned, self._history))  # the staging views stay valid
        self._scales = None

    def infinities(self) -> list[int]:
        """How many infinite amaxes each column's history holds."""
        counts: list[int] = torch.isinf(self._history).sum(dim=0).tolist()
        return counts

    def read(self, first: int, count: int) -> AmaxHistory:
        """Copies of the columns ``first .. first + count``."""
        part = slice(first, first + count)
        return AmaxHistory(
            self._history[:, part].clone(), self._scale[part].clone(), self._updates[part].clone()
        )

    def write(self, first: int, values: AmaxHistory) -> None:
        """Puts ``values``, as ``read`` gave them, back in place."""
        part = slice(first, first + values.scale.numel())
        self._history[:, part] = values.amax_history
        self._scale[part] = values.scale
        self._updates[part] = values.updates
        self._scales = None
