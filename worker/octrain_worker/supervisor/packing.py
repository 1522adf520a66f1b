"""A batch of telemetry as the API takes it: metrics in compressed columns, the rest as JSON.

The format is the API's (octrain_api.attempts.body). Values of one step come as a name-to-number
mapping and leave as one row of a matrix; steps with the same names share one. No numpy here: the
supervisor stays small, and slices of ``array`` do the same at the same speed.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8core.telemetry import decode_number

__all__ = ["CONTENT_TYPE", "pack"]

CONTENT_TYPE = "application/vnd.octrain.telemetry.v1"
_MAGIC = b"OCT1"
_BAND_BYTES = 1 << 16
_LEVEL = 1
_MAX_NAME = 512
# So many matrices in a batch at most; steps of further sets of names share the last one.
_MAX_FRAMES = 16

Names = tuple[str, ...]


@dataclass
class _Rows:
    """The steps of a batch that have these names, in order, and their values row after row."""

    names: Names
    offsets: list[int] = field(default_factory=list)
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class _Step:
    step: int
    time: float | None
    tokens: int | None


def pack(token: int | str, first_seq: int, records: Sequence[dict[str, Any]]) -> bytes:
    """The body for records ``first_seq``, ``first_seq + 1``, ..."""
    plain: list[tuple[int, dict[str, Any]]] = []
    groups: dict[Names, _Rows] = {}
    steps: dict[int, _Step] = {}
    tokens = _tokens_by_step(records)
    for offset, record in enumerate(records):
        if record.get("type") != "metrics" or not _add(groups, offset, record):
            plain.append((offset, record))
            continue
        step = record["step"]
        counted = record.get("tokens", tokens.get(step))
        moment = record.get("time")
        steps[offset] = _Step(
            step,
            moment if type(moment) in (int, float) else None,
            counted if type(counted) is int and 0 <= counted < 2**63 else None,
        )
    frames = []
    data: list[bytes] = []
    for sharing in _sharing(list(groups.values())):
        frame, bands = _frame(sharing, steps)
        frames.append(frame)
        data += bands
    head = {
        "fencing_token": token,
        "first_seq": first_seq,
        "count": len(records),
        "records": plain,
        "frames": frames,
    }
    packed = zlib.compress(json.dumps(head, separators=(",", ":")).encode(), _LEVEL)
    return b"".join([_MAGIC, struct.pack("<I", len(packed)), packed, *data])


def _tokens_by_step(records: Sequence[dict[str, Any]]) -> dict[Any, Any]:
    """What the progress records of the batch say of how many tokens a step had seen."""
    return {
        record["step"]: record.get("tokens")
        for record in records
        if record.get("type") == "progress" and type(record.get("step")) is int
    }


def _add(groups: dict[Names, _Rows], offset: int, record: dict[str, Any]) -> bool:
    """Whether the record fits in a matrix; one that does not is for the API to judge."""
    values, step = record.get("values"), record.get("step")
    if not isinstance(values, dict) or not values or type(step) is not int or not 0 <= step < 2**62:
        return False
    names = tuple(values)
    rows = groups.get(names)
    if rows is None:
        if not all(0 < len(name) <= _MAX_NAME for name in names):
            return False
        rows = _Rows(names)
    numbers: Any = values.values()
    if not set(map(type, numbers)) <= {float, int}:
        if any(type(number) not in (float, int, str) for number in numbers):
            return False
        try:
            numbers = [decode_number(number) for number in numbers]
        except ValueError:
            return False
    length = len(rows.values)
    try:
        rows.values.extend(numbers)
    except OverflowError:
        del rows.values[length:]
        return False
    groups[names] = rows
    rows.offsets.append(offset)
    return True


def _sharing(groups: list[_Rows]) -> list[list[_Rows]]:
    """Groups put together so that no name is in two of the results, which are few."""
    found: list[tuple[set[str], list[_Rows]]] = []
    for group in groups:
        names, together = set(group.names), [group]
        rest = []
        for other_names, others in found:
            if names.isdisjoint(other_names):
                rest.append((other_names, others))
            else:
                names |= other_names
                together = others + together
        found = [*rest, (names, together)]
        if len(found) > _MAX_FRAMES:
            (first, a), (second, b) = found[-2:]
            found[-2:] = [(first | second, a + b)]
    return [together for _, together in found]


def _frame(groups: list[_Rows], steps: dict[int, _Step]) -> tuple[dict[str, Any], list[bytes]]:
    masked = len(groups) > 1
    offsets = sorted(offset for group in groups for offset in group.offsets)
    if masked:
        names, columns, bits = _sparse_columns(groups, offsets)
    else:
        names, bits = list(groups[0].names), []
        # Column n of a matrix that lies row after row.
        columns = [groups[0].values[n :: len(names)] for n in range(len(names))]
    per_band = max(_BAND_BYTES // (len(offsets) * 8), 1)
    sizes: list[tuple[int, int]] = []
    bands: list[bytes] = []
    for start in range(0, len(names), per_band):
        part = columns[start : start + per_band]
        values = array("d")
        for column in part:
            values.extend(column)
        band = zlib.compress(b"".join(bits[start : start + per_band]) + _shuffled(values), _LEVEL)
        sizes.append((len(part), len(band)))
        bands.append(band)
    frame = {
        "names": names,
        "offsets": offsets,
        "steps": [steps[offset].step for offset in offsets],
        "times": [steps[offset].time for offset in offsets],
        "tokens": [steps[offset].tokens for offset in offsets],
        "masked": masked,
        "bands": sizes,
    }
    return frame, bands


def _sparse_columns(
    groups: list[_Rows], offsets: list[int]
) -> tuple[list[str], list[array[float]], list[bytes]]:
    """Names, the values that each has, and one bit a row that says where it has one."""
    row_of = {offset: row for row, offset in enumerate(offsets)}
    cells: dict[str, list[tuple[int, float]]] = {}
    for group in groups:
        width = len(group.names)
        for column, name in enumerate(group.names):
            rows = [row_of[offset] for offset in group.offsets]
            cells.setdefault(name, []).extend(zip(rows, group.values[column::width], strict=True))
    columns, bits = [], []
    for found in cells.values():
        found.sort(key=lambda cell: cell[0])
        columns.append(array("d", [value for _, value in found]))
        mask = sum(1 << row for row, _ in found)
        bits.append(mask.to_bytes(-(-len(offsets) // 8), "little"))
    return list(cells), columns, bits


def _shuffled(values: array[float]) -> bytes:
    """All first bytes of the little-endian values, then all second ones, ..."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    plain = values.tobytes()
    return b"".join(plain[n::8] for n in range(8))
