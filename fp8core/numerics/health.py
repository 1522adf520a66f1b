"""FP8 health: how much of a tensor a cast cut off at the top and lost at the bottom.

* saturated: elements with ``|x * scale| > FP8_MAX``, over all elements;
* underflow: ``(nonzero(x) - nonzero(q(x))) / numel`` with both zeros counted as zero, the
  definition of Transformer Engine's ``underflows%`` (``debug/features/log_fp8_tensor_stats.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8core.numerics.casts import Float8Format

__all__ = ["HealthRecorder"]


class HealthRecorder:
    """Gathers the health of every cast of a step; several casts of a tensor are taken together."""

    def __init__(self) -> None:
        self._gathered: dict[str, _Gathered] = {}
        self._taken: dict[str, dict[str, float]] = {}

    def record(
        self,
        key: str,
        tensor: Tensor,
        amax: Tensor,
        scale: Tensor,
        codes: Tensor,
        fmt: Float8Format,
    ) -> None:
        """Counts one cast of ``tensor`` with ``scale`` to ``codes`` under ``key``."""
        gathered = self._gathered.setdefault(key, _Gathered())
        scaled = tensor.float() * scale
        kept = torch.count_nonzero(codes.view(torch.uint8) & 0x7F)
        gathered.saturated += int(torch.count_nonzero(scaled.abs() > fmt.max))
        gathered.lost += int(torch.count_nonzero(tensor) - kept)
        gathered.elements += tensor.numel()
        gathered.amax = max(gathered.amax, float(amax))
        gathered.scale = float(scale)

    def take(self, key: str, figures: dict[str, float]) -> None:
        """The figures of a tensor whose one cast lies behind it; the same at each use."""
        self._taken[key] = figures

    def figures(self) -> dict[str, float]:
        """``fp8/<key>/amax|scale|saturated|underflow`` for every key seen."""
        figures: dict[str, float] = {}
        for key, gathered in self._gathered.items():
            elements = max(gathered.elements, 1)
            figures[f"fp8/{key}/amax"] = gathered.amax
            figures[f"fp8/{key}/scale"] = gathered.scale
            figures[f"fp8/{key}/saturated"] = gathered.saturated / elements
            figures[f"fp8/{key}/underflow"] = gathered.lost / elements
        for key, taken in self._taken.items():
            figures.update({f"fp8/{key}/{figure}": value for figure, value in taken.items()})
        return figures


class _Gathered:
    """Sums over the casts of one tensor; the scale is the last cast's."""

    def __init__(self) -> None:
        self.amax = 0.0
        self.scale = 1.0
        self.saturated = 0
        self.lost = 0
        self.elements = 0
