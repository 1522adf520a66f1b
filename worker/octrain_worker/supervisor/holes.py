"""Files that somebody appends to without end: their middle gives its blocks back, as a hole.

Offsets stay what they were, for whoever writes and for whoever reads.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

__all__ = ["aligned", "data_from", "punch_hole"]

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_BLOCK = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def punch_hole(path: Path, start: int, end: int) -> bool:
    """Gives the bytes from ``start`` to ``end``, both ``aligned``, back to the disk.

    False where the file system makes no holes (ramfs, NFS before 4.2). Raises ``OSError``.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mode = _PUNCH_HOLE | _KEEP_SIZE
        if _LIBC.fallocate(descriptor, mode, start, end - start) == 0:
            return True
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))
        return False
    finally:
        os.close(descriptor)


def data_from(descriptor: int, offset: int) -> int | None:
    """The first offset from ``offset`` on that is in no hole; None when there is none."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


def aligned(offset: int) -> int:
    """The last offset up to ``offset`` at which a hole can begin or end."""
    return offset // _BLOCK * _BLOCK
