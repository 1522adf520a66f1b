"""What the trainer prints, bounded on the node's disk however much it is.

The trainer appends to two files for as long as it lives, so they cannot be moved away. Of each the
beginning and the end are kept and what lies between gives its blocks back, as a hole: offsets stay
what they were, for the trainer that writes and the collector that reads. With a limit of L bytes
a file that takes more than L keeps its first L/4 and its last L/2. Where the file system makes no
holes (ramfs, NFS before 4.2) such a file is emptied instead, and begins anew.

Lines reach the API long before: the collector is never further behind than the part that is kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from octrain_worker.supervisor.holes import aligned, punch_hole

__all__ = ["SMALLEST_LIMIT", "bound_logs", "without_hole"]

logger = logging.getLogger(__name__)

# Half of it must hold what the collector may be behind, 8 MiB.
SMALLEST_LIMIT = 32 << 20
_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 16


def bound_logs(paths: Iterable[Path], limit: int) -> None:
    """Makes each file take at most about ``limit`` bytes of the disk. Errors are logged."""
    for path in paths:
        try:
            found = path.stat()
            if found.st_blocks * 512 > limit:
                _shorten(path, found.st_size, limit)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.error("%s cannot be shortened: %s", path, error)


def _shorten(path: Path, size: int, limit: int) -> None:
    start, end = aligned(limit // 4), aligned(size - limit // 2)
    if end <= start or punch_hole(path, start, end):
        return
    os.truncate(path, 0)
    logger.warning("%s was emptied: its file system makes no holes", path)


def without_hole(path: Path, folder: Path) -> Path:
    """The file itself, or where it has a hole a copy below ``folder`` with a line in its place.

    Raises ``OSError`` when there is no room for the copy.
    """
    with path.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        hole = os.lseek(source.fileno(), 0, os.SEEK_HOLE) if size else 0
        if hole >= size:
            return path
        after = os.lseek(source.fileno(), hole, os.SEEK_DATA)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / path.name
        with target.open("wb") as copy:
            source.seek(0)
            _copy(source, copy, hole)
            source.seek(after)
            rest = source.readline(_LONGEST_LINE)  # the end of a line whose beginning is gone
            copy.write(b"\n[... %d bytes were not kept ...]\n" % (after + len(rest) - hole))
            _copy(source, copy, size - after - len(rest))
    return target


def _copy(source: BinaryIO, copy: BinaryIO, count: int) -> None:
    while count > 0:
        data = source.read(min(count, _CHUNK))
        if not data:
            return
        copy.write(data)
        count -= len(data)
