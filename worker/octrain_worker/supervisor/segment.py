"""One segment of the spool as it lies on the disk, which may have damaged it.

Every line is a number and its record, the numbers rise by one. Where a line is none (zeros,
garbage, a letter that has changed, a sector that cannot be read) the next that is one tells by its
number how many records lay between. A damaged line never ends the reading: what is before and
behind it counts.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8core.stored_json import decode_object

__all__ = ["SHORTEST_LINE", "Line", "Survey", "lines_of", "sealed", "survey"]

# b'{"seq":1,"record":{}}\n', as earlier versions wrote it, without a checksum: no more numbers lie
# in so many bytes.
SHORTEST_LINE = 22
# Longer ones are damage: nothing makes them, and a file of zeros is one line.
_LONGEST_LINE = 64 << 20
_BEGINNING = b'{"seq":'
# What a disk answers for a file that it no longer has, or has only in part.
_GONE = frozenset({errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENODATA, errno.EUCLEAN})


_CHECKSUM = b',"crc":'


def sealed(line: bytes) -> bytes:
    """A JSON object, one line, with the checksum of all before it: a digit that has changed on the
    disk would pass for another figure."""
    body = line.removesuffix(b"}\n")
    return b"%b%b%d}\n" % (body, _CHECKSUM, zlib.crc32(body))


@dataclass(frozen=True)
class Line:
    """A line with its number. ``begin`` is where what could not be read before it begins, which is
    ``damaged`` bytes (with none: where the line itself begins); ``end`` is after the line."""

    seq: int
    record: dict[str, Any]
    begin: int
    end: int
    damaged: int
    source: tuple[str, int] | None = None
    goes_on: bool = False


@dataclass
class Survey:
    """What a whole segment holds.

    ``last`` is its last number that can be read; ``whole_last`` that of the last write that is
    whole, and ``whole`` the offset after it. ``positions`` are those of the sources, of which
    ``complete`` tells whether those of earlier segments are among them. ``damaged`` counts bytes
    anywhere, ``lost_end`` those after the last line that can be read.
    """

    last: int
    whole_last: int
    whole: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    damaged: int = 0
    lost_end: int = 0


def lines_of(path: Path, offset: int, expected: int, end: int) -> Iterator[Line | int]:
    """The lines from ``offset`` on, where number ``expected`` is due; none has ``end`` or more.

    Last comes, where there are any, the number of bytes at the end that are no line. Raises
    ``OSError`` for what may pass, as too many open files; a file that is gone has no lines.
    """
    begin = at = offset
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while line := file.readline(_LONGEST_LINE):
                start, at = at, at + len(line)
                if start == 0 and _positions(line) is not None:
                    begin = at
                    continue
                found = _line(line, begin, at, start - begin)
                due = found is not None and expected <= found.seq < end
                # Without damage before it, it is the next one, or its number has changed.
                if found is not None and due and (found.damaged or found.seq == expected):
                    yield found
                    begin, expected = at, found.seq + 1
    except OSError as error:
        if error.errno not in _GONE:
            raise
        at = max(at, _size(path))
    if at > begin:
        yield at - begin


def survey(path: Path, first: int) -> Survey:
    """Reads the segment whose first number is ``first`` from its beginning to its end."""
    size = _size(path)
    found = Survey(last=first - 1, whole_last=first - 1)
    line: Line | int
    try:
        with path.open("rb") as file:
            head = file.readline(_LONGEST_LINE)
            positions = _positions(head)
            if positions is not None:
                found.positions, found.complete, found.whole = positions, True, len(head)
    except OSError as error:
        if error.errno not in _GONE:
            raise
    for line in lines_of(path, 0, first, first + size // SHORTEST_LINE + 1):
        if isinstance(line, int):
            if not _is_torn(path, size - line):
                found.damaged += line
                found.lost_end = line
            break
        found.damaged += line.damaged
        found.last = line.seq
        if line.source is not None:
            found.positions[line.source[0]] = line.source[1]
        if not line.goes_on:
            found.whole, found.whole_last = line.end, line.seq
    return found


def _line(line: bytes, begin: int, end: int, damaged: int) -> Line | None:
    value = _decoded(line)
    if value is None and (behind := line.rfind(_BEGINNING)) > 0:
        # The newline before it was damaged too. (Within a record quotes are escaped.)
        return _line(line[behind:], begin, end, damaged + behind)
    if value is None:
        return None
    seq, record = value.get("seq"), value.get("record")
    if type(seq) is not int or not isinstance(record, dict):
        return None
    source = _source(value["from"]) if "from" in value else None
    return Line(seq, record, begin, end, damaged, source, bool(value.get("goes_on")))


def _decoded(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line that is as it was written."""
    value = decode_object(line) if line.endswith(b"\n") else None
    if value is None or "crc" not in value:
        return value
    end = line.rfind(_CHECKSUM)
    return value if zlib.crc32(memoryview(line)[: max(end, 0)]) == value["crc"] else None


def _source(value: Any) -> tuple[str, int] | None:
    match value:
        case [str(name), int(position)] if position >= 0:
            return name, position
    return None


def _positions(line: bytes) -> dict[str, int] | None:
    value = _decoded(line)
    positions = value.get("positions") if value is not None else None
    if not isinstance(positions, dict):
        return None
    if any(type(position) is not int or position < 0 for position in positions.values()):
        return None
    return positions


def _is_torn(path: Path, begin: int) -> bool:
    """Whether the file ends, from ``begin`` on, within a line: of a write that was never whole, so
    that none of it has been sent. Damage looks otherwise: it has ends of lines, or no beginning."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            rest = file.readline(_LONGEST_LINE)
            more = file.read(1)
    except OSError:
        return False
    starts = any(one.startswith(rest[: len(one)]) for one in (_BEGINNING, b'{"positions":'))
    return starts and not more and not rest.endswith(b"\n") and b"\0" not in rest


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
