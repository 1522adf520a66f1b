"""Numbers as JSON can carry them: NaN and the infinities are strings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["decode_number", "encode_number", "jsonable"]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_number(value: float) -> float | int | str:
    """``value`` as JSON can carry it: NaN and the infinities become strings."""
    if isinstance(value, int) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_number(value: float | int | str) -> float:
    """The number that ``encode_number`` wrote. Raises ``ValueError`` for any other string."""
    if isinstance(value, str):
        if value not in _NON_FINITE:
            raise ValueError(f"{value!r} is not a number")
        return _NON_FINITE[value]
    return float(value)


def jsonable(value: Any) -> Any:
    """``value`` with every non-finite number as a string, so that it is strict JSON."""
    if isinstance(value, float):
        return encode_number(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value
