"""Small disks, for tests of full ones: a tmpfs that no killed test leaves behind."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["NoSmallDisk", "small_disk"]

_CLONE_NEWNS = 0x00020000


class NoSmallDisk(Exception):
    """No file system may be mounted here."""


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mounts a tmpfs of ``size`` bytes on ``folder``, which is made, until the block is left.

    It is seen by the calling thread and by all that is started from it later, and by nobody else:
    the kernel takes it away with the last of these processes, however they end. Errors:
    NoSmallDisk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _leave_mounts_of_all()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise NoSmallDisk(str(error)) from None
    except subprocess.CalledProcessError as error:
        raise NoSmallDisk(error.stderr.strip()) from None
    try:
        yield folder
    finally:
        # Lazily: what still runs there may end later.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@functools.cache
def _leave_mounts_of_all() -> None:
    """From here on, mounts are this thread's own, where that is permitted."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=False, capture_output=True)
