"""How long a layer takes on a card in bf16 and in FP8, between the sizes that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from fp8core.measured.tables import find_table

__all__ = ["LayerKind", "LayerTimes", "layer_times"]

LayerKind = Literal["linear", "norm_linear", "norm_mlp"]
"""A Linear; a norm and the Linears of query, key and value; a norm and a gated MLP."""

_Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class LayerTimes:
    """Microseconds of forward, dgrad and wgrad of one layer, casts and the host's work included.

    ``grids``: by kind and column (``bf16``, or a scaling of te, and ``_graphed`` behind them for
    steps replayed as CUDA graphs, without the host's work), the measured times by (tokens,
    in features, out features; of ``norm_mlp`` the inner ones).
    """

    card: str
    date: str
    grids: Mapping[tuple[str, str], Mapping[tuple[int, int, int], float]]

    @property
    def columns(self) -> set[str]:
        """``bf16`` and the scalings that were measured."""
        return {column for _, column in self.grids}

    def measured_tokens(self, tokens: int) -> int:
        """The number of tokens that is judged by: ``tokens``, or the measured one at that end."""
        counts = {size[0] for grid in self.grids.values() for size in grid}
        return min(max(tokens, min(counts)), max(counts))

    def microseconds(
        self, kind: LayerKind, column: str, tokens: int, width: int, out: int
    ) -> float | None:
        """Between measured sizes log-linear in each of them; None for what nothing is known of.

        Tokens beyond the measured ones are taken as those at that end: times of both precisions
        grow alike there. So are widths below the least. Of wider layers nothing is known.
        """
        grid = self.grids.get((kind, column))
        if not grid:
            return None
        axes = _axes(grid)
        if width > axes[1][-1] or out > axes[2][-1]:
            return None
        sides = [_around(axis, at) for axis, at in zip(axes, (tokens, width, out), strict=True)]
        total = 0.0
        for corner in product(*sides):
            time = grid.get(tuple(size for size, _ in corner))  # type: ignore[arg-type]  # three
            if time is None:
                return None
            total += math.log(time) * math.prod(share for _, share in corner)
        return math.exp(total)


def layer_times(card: str) -> LayerTimes | None:
    """The times measured on ``card``, or None where none were."""
    table = find_table("layers", card)
    return None if table is None else _read(table)


def _read(table: Mapping[str, Any]) -> LayerTimes:
    grids: dict[tuple[str, str], dict[tuple[int, int, int], float]] = {}
    for row in table["rows"]:
        size = (row["tokens"], row["in"], row["out"])
        for column, time in row.items():
            if isinstance(time, float) and not column.endswith("_host"):
                grids.setdefault((row["kind"], column), {})[size] = time
    return LayerTimes(card=table["card"], date=table["date"], grids=grids)


def _axes(grid: Mapping[tuple[int, int, int], float]) -> _Axes:
    tokens, widths, outs = (tuple(sorted(set(sizes))) for sizes in zip(*grid, strict=True))
    return tokens, widths, outs


def _around(axis: Sequence[int], at: int) -> list[tuple[int, float]]:
    """The measured sizes on either side of ``at``, with their shares; one beyond the ends."""
    if at <= axis[0]:
        return [(axis[0], 1.0)]
    if at >= axis[-1]:
        return [(axis[-1], 1.0)]
    above = next(index for index, size in enumerate(axis) if size >= at)
    low, high = axis[above - 1], axis[above]
    share = math.log(at / low) / math.log(high / low)
    return [(low, 1.0 - share), (high, share)]
