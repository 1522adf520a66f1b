"""What a disk, a crash or a hand does to a file: the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["damaged", "other_values", "read_each_damaged"]

_SEEDS = range(160)

_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**70, 1.5, float("nan"), float("inf"), "", "x", "\ud800", "a\0b"),
    *("../..", "x" * 5000, [], {}, [[]], {"a": {"b": None}}, ["x", 1]),
)


def read_each_damaged(file: Path, content: Any, read: Callable[[], None]) -> None:
    """Writes 160 damaged forms of a value, or of lines, to ``file``, and has each read."""
    lines = content if isinstance(content, list) else [content]
    whole = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    for seed in _SEEDS:
        file.write_bytes(damaged(whole, seed))
        try:
            read()
        except Exception as error:
            raise AssertionError(f"{file.name}, seed {seed}") from error


def damaged(data: bytes, seed: int) -> bytes:
    """Cut, zeroed, with garbage amid it, not UTF-8, too deep, with a huge line, or of odd values
    where it is lines of JSON."""
    chance = random.Random(seed)
    begin = chance.randrange(len(data) + 1)
    size = chance.choice([1, 9, 80, 4096])
    line = data.rfind(b"\n", 0, begin) + 1
    match seed % 8:
        case 0:
            return data[:begin]
        case 1:
            return data[:begin] + b"\0" * len(data[begin : begin + size]) + data[begin + size :]
        case 2:
            return data[:begin] + chance.randbytes(size) + data[begin + size :]
        case 3:
            return data[:line] + b"\xff\xfe\xc3" + data[line:]
        case 4:
            return data[:line] + b'{"type":' + b"[" * 100_000 + b"\n" + data[line:]
        case 5:
            return data[:line] + b"\0" * (1 << 20) + b"\n" + data[line:]
        case 6:
            return data[:line] + chance.choice([b"7\n", b"NaN\n", b"[]\n", b"null\n"]) + data[line:]
        case _:
            lines = data.splitlines(keepends=True)
            number = chance.randrange(len(lines))
            value = json.loads(lines[number])
            lines[number] = json.dumps(other_values(value, chance)).encode() + b"\n"
            return b"".join(lines)


def other_values(value: Any, chance: random.Random) -> Any:
    """The value with one of its parts, or all of it, replaced by something odd."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        if chance.random() < 0.1:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: other_values(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        number = chance.randrange(len(value))
        return [*value[:number], other_values(value[number], chance), *value[number + 1 :]]
    return chance.choice(_ODD)
