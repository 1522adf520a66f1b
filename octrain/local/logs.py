"""The log files of the children, kept small.

A child writes to its file itself (in append mode), so that its log does not depend on us; when the
file is large its content moves to ``name.1`` and the file is cut. What a child writes in the
instant between the copy and the cut is lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

LIMIT_BYTES = 16 * 2**20
KEPT = 3


def rotate(log: Path, limit_bytes: int = LIMIT_BYTES, kept: int = KEPT) -> bool:
    """Cut the log when it is larger than the limit; whether it was."""
    try:
        if log.stat().st_size <= limit_bytes:
            return False
    except FileNotFoundError:
        return False
    for number in range(kept - 1, 0, -1):
        older = _numbered(log, number)
        if older.exists():
            older.replace(_numbered(log, number + 1))
    shutil.copy2(log, _numbered(log, 1))
    with log.open("r+b") as file:
        file.truncate(0)
    return True


def _numbered(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
