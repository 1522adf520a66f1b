"""Tables of a card that does not exist, in the place of those that were measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CARD = "Planted Card 9000"
TOKENS = (256, 1024)
WIDTHS = (32, 128, 512)

Time = Callable[[str, int, int, int], float]
"""(kind, tokens, in, out) to microseconds."""


def from_128_on(kind: str, tokens: int, width: int, out: int) -> float:
    """Of FP8 beside `bf16_time`: half its time where both sides are 128 or more, else twice."""
    return bf16_time(kind, tokens, width, out) * (0.5 if min(width, out) >= 128 else 2.0)


def bf16_time(kind: str, tokens: int, width: int, out: int) -> float:
    return float(tokens * width * out) / 1e6


def plant_layers(
    folder: Path,
    fp8: Time = from_128_on,
    scaling: str = "delayed",
    graphed: Time | None = None,
    graphed_kinds: Sequence[str] = ("linear", "norm_linear", "norm_mlp"),
) -> None:
    """``graphed``: of FP8 in steps replayed as CUDA graphs; bf16 takes a tenth of its time then."""
    rows: list[dict[str, Any]] = []
    for kind in ("linear", "norm_linear", "norm_mlp"):
        for size in ((t, i, o) for t in TOKENS for i in WIDTHS for o in WIDTHS):
            times = {"bf16": bf16_time(kind, *size), scaling: fp8(kind, *size)}
            hosts = {f"{name}_host": 1.0 for name in times}
            if graphed is not None and kind in graphed_kinds:
                times["bf16_graphed"] = bf16_time(kind, *size) / 10
                times[f"{scaling}_graphed"] = graphed(kind, *size)
            sizes = dict(zip(("tokens", "in", "out"), size, strict=True))
            rows.append({"kind": kind, **sizes, **times, **hosts})
    _write(folder / "planted.layers.json", {"rows": rows})


def plant_models(
    folder: Path, speeds: dict[int, dict[str, int]], graphed: Sequence[str] = ()
) -> None:
    """``speeds``: tokens a second by row of each number of parameters; ``graphed``: the rows whose
    steps were replayed as CUDA graphs."""
    rows = [
        {
            "size": f"{parameters}p",
            "parameters": parameters,
            "precision": "bf16",
            "row": row,
            "tokens_per_second": speed,
            "date": "2026-01-02",
            **({"graphed": True} if row in graphed else {}),
        }
        for parameters, group in speeds.items()
        for row, speed in group.items()
    ]
    _write(folder / "planted.models.json", {"tokens": 8192, "rows": rows})


def _write(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps({"format": 1, "card": CARD, "date": "2026-01-02", **table}))
