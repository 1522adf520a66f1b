"""Records of metrics of more values than the API takes at once, in pieces that it takes.

A model of thousands of layers has more figures of FP8 health than one record may hold. Each piece
is a record of its own, of the same step and time; a reader of series sees no difference.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

__all__ = ["MOST_VALUES", "pieces_of"]

# What the API takes: octrain_api.attempts.body, MAX_COLUMNS.
MOST_VALUES = 20_000


def pieces_of(record: dict[str, Any], most: int = MOST_VALUES) -> list[dict[str, Any]]:
    """The record, or as few records of at most so many of its values as hold them all."""
    values = record.get("values")
    if record.get("type") != "metrics" or not isinstance(values, dict) or len(values) <= most:
        return [record]
    left = iter(values.items())
    count = -(-len(values) // most)
    return [{**record, "values": dict(islice(left, most))} for _ in range(count)]
