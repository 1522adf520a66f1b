"""How much faster whole models train in FP8 than in bf16 on a card, by size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8core.measured.tables import find_table

__all__ = ["ModelSpeeds", "model_speeds", "nearest_model"]

_FARTHEST = 3.0
"""What a model of a tenth of the size does says nothing of this one."""
_FUSED_BF16 = "octrain_bf16"
_OWN_PLAIN_BF16, _PEERS_PLAIN_BF16 = "octrain_bf16_plain", "bf16"
"""Layer by layer, as a job computes it, and by transformers with no part of ours."""
_PLAIN_BF16 = (_OWN_PLAIN_BF16, _PEERS_PLAIN_BF16)
_BF16_ROWS = (_FUSED_BF16, *_PLAIN_BF16)


@dataclass(frozen=True)
class ModelSpeeds:
    """One measured size. Tokens a second by row of `benchmarks/train_peers.py`.

    ``tokens``: of one step; ``precision``: of the weights. ``graphed``: of which rows the steps
    were replayed as CUDA graphs.
    """

    card: str
    size: str
    parameters: int
    tokens: int
    precision: str
    date: str
    tokens_per_second: Mapping[str, float]
    graphed: frozenset[str]

    def bf16_beside(self, row: str) -> tuple[float, bool]:
        """The fastest way in bf16 that a job whose FP8 is like ``row`` has, and whether blocks are
        fused in it: what cannot be fused in FP8 cannot be in bf16 either. A peer's row stands for
        a job's only where that was not measured: the two may be of other runs."""
        speeds = self.tokens_per_second
        rows = [bf16 for bf16 in _BF16_ROWS if bf16 in speeds]
        if _OWN_PLAIN_BF16 in rows and _PEERS_PLAIN_BF16 in rows:
            rows.remove(_PEERS_PLAIN_BF16)
        if row == "plain":
            rows = [bf16 for bf16 in rows if bf16 in _PLAIN_BF16] or rows
        return max(speeds[bf16] for bf16 in rows), _FUSED_BF16 in rows


def model_speeds(card: str) -> list[ModelSpeeds]:
    """The sizes measured on ``card`` in FP8 and in bf16, the smallest first; none: not measured."""
    table = find_table("models", card)
    if table is None:
        return []
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in table["rows"]:
        groups.setdefault((row["parameters"], row["precision"]), []).append(row)
    found = []
    for (parameters, precision), rows in sorted(groups.items()):
        speeds = {row["row"]: float(row["tokens_per_second"]) for row in rows}
        if any(row in speeds for row in _BF16_ROWS) and len(speeds.keys() - set(_BF16_ROWS)):
            found.append(
                ModelSpeeds(
                    card=table["card"],
                    size=rows[0]["size"],
                    parameters=parameters,
                    tokens=table["tokens"],
                    precision=precision,
                    date=max(row["date"] for row in rows),
                    tokens_per_second=speeds,
                    graphed=frozenset(row["row"] for row in rows if row.get("graphed")),
                )
            )
    return found


def nearest_model(card: str, parameters: int) -> ModelSpeeds | None:
    """The measured size whose number of parameters is nearest by ratio, which is 3 at most."""
    found = model_speeds(card)
    if not found or parameters < 1:
        return None

    def ratio(speeds: ModelSpeeds) -> float:
        return max(speeds.parameters / parameters, parameters / speeds.parameters)

    nearest = min(found, key=ratio)
    return nearest if ratio(nearest) <= _FARTHEST else None
