"""JSON that was written earlier and is read back, by one who knows that a disk may have damaged it.

Damage is no reason to end: whoever reads back a note of its own, or a line of somebody's file, goes
on without it. To what is JSON all the same the reader has still to look: it may be of any shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["decode_json", "decode_object", "read_object"]


def decode_json(data: bytes | str) -> Any:
    """The value; None where the data is no JSON, in UTF-8, of a sane depth."""
    try:
        # A number that Python will not convert is a ValueError too.
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def decode_object(data: bytes | str) -> dict[str, Any] | None:
    """The JSON object; None where the data is none."""
    value = decode_json(data)
    return value if isinstance(value, dict) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file, or it is none."""
    try:
        return decode_object(path.read_bytes())
    except OSError:
        return None
