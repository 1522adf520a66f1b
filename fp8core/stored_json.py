"""JSON that was written earlier and is read back, by one who knows that a disk may have damaged it.

Damage is no reason to end: whoever reads back a note of its own, or a line of somebody's file, goes
on without it. To what is JSON all the same the reader has still to look: it may be of any shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["decode_json", "decode_object", "read_json", "read_object"]

# Deeper than anything that is written; what can just be read could not be written again.
_MOST_DEPTH = 100


def decode_json(data: bytes | str) -> Any:
    """The value; None where the data is no JSON, in UTF-8, of a sane depth."""
    try:
        # A number that Python will not convert is a ValueError too.
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    opening: tuple[Any, Any] = (b"[", b"{") if isinstance(data, bytes) else ("[", "{")
    if sum(map(data.count, opening)) <= _MOST_DEPTH:
        return value
    return None if _is_deeper(value, _MOST_DEPTH) else value


def decode_object(data: bytes | str) -> dict[str, Any] | None:
    """The JSON object; None where the data is none."""
    value = decode_json(data)
    return value if isinstance(value, dict) else None


def read_json(path: Path) -> Any:
    """The value in a JSON file; None where there is no such file, or it is no JSON."""
    try:
        return decode_json(path.read_bytes())
    except OSError:
        return None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file, or it is none."""
    value = read_json(path)
    return value if isinstance(value, dict) else None


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects lie in one another more than ``depth`` times."""
    level = [value]
    for _ in range(depth + 1):
        held: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                held += [each for each in one.values() if isinstance(each, (dict, list))]
            elif isinstance(one, list):
                held += [each for each in one if isinstance(each, (dict, list))]
        if not held:
            return False
        level = held
    return True
