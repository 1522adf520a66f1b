"""Floats through JSON: NaN and the infinities travel as strings."""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: float) -> float | str:
    """A finite float as it is, else "NaN", "Infinity" or "-Infinity"."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode(value: Any) -> Any:
    """The inverse of `encode`; anything else is left for the validator behind."""
    if isinstance(value, str):
        return _NAMES.get(value, value)
    if isinstance(value, bool):
        raise ValueError("a metric value must be a number, not a boolean")
    return value


Number = Annotated[float, BeforeValidator(decode)]


def clean(value: Any) -> Any:
    """Replace what PostgreSQL cannot store (NUL, lone surrogates) and non-finite floats, deeply."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return encode(value)
    if isinstance(value, dict):
        return {clean_text(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, list):
        return [clean(v) for v in value]
    return value


def clean_text(text: str) -> str:
    """Replace NUL and lone surrogates by U+FFFD."""
    return text.replace("\x00", "�").encode("utf-8", "surrogatepass").decode("utf-8", "replace")
