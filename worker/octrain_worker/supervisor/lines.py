"""Lines of a file that another process appends to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["LONGEST_LINE", "lines_from"]

# More is no line that anybody writes: a file of zeros is one.
LONGEST_LINE = 64 << 20

_READ_BYTES = 1 << 20


def lines_from(
    path: Path, position: int, *, ended: bool = False, longest: int = LONGEST_LINE
) -> Iterator[tuple[bytes, int]]:
    """Lines from ``position`` on, without their newline, each with the offset after it.

    At most 1 MiB is read, but all of a line that is longer, up to ``longest``. With ``ended`` a
    last line without its newline is a line too. A line longer than ``longest`` is given as its
    beginning; its offset is after all of it, or after what is read of it (the rest is then a line
    of its own).
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(position)
        data = file.read(_READ_BYTES)
        while data and len(data) <= longest and b"\n" not in data:
            more = file.read(max(_READ_BYTES, len(data)))
            if not more:
                break
            data += more
    start = 0
    while start < len(data):
        newline = data.find(b"\n", start)
        if newline >= 0:
            end = newline + 1
            line = data[start:newline]
        elif ended or len(data) - start > longest:
            end = len(data)
            line = data[start:]
        else:
            return
        yield line.rstrip(b"\r")[:longest], position + end
        start = end
