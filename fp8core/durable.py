"""Files that are on disk as a whole or not at all, and a full disk told from other faults."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fp8core.errors import StorageFull

__all__ = [
    "PARTIAL_PREFIX",
    "is_full",
    "sync_file",
    "sync_folder",
    "told_when_full",
    "whole_file",
    "write_json",
]

# Names that begin so are unfinished files: never listed, never read.
PARTIAL_PREFIX = ".partial-"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file open for writing that takes its name only when it is complete and synced."""
    partial = target.with_name(f"{PARTIAL_PREFIX}{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as writer:
            yield writer
            writer.flush()
            os.fsync(writer.fileno())
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise
    sync_folder(target.parent)


def write_json(target: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, as a whole or not at all. Raises ``StorageFull``."""
    data = json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
    with told_when_full(target), whole_file(target) as writer:
        writer.write(data)


def sync_file(path: Path) -> None:
    """Waits until the content of a file is on disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


@contextlib.contextmanager
def told_when_full(place: Path) -> Iterator[None]:
    """Turns "no space left on device" and "quota exceeded" into ``StorageFull``."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        why = error.strerror or os.strerror(errno.ENOSPC)
        raise StorageFull(f"no room left to write {place}: {why}") from error


def is_full(error: OSError) -> bool:
    """Whether it is for want of room that something could not be written."""
    if isinstance(error, shutil.Error):
        # Of a tree that was copied: it has no number, but the texts of those of its files.
        return any(f"[Errno {number}]" in str(error) for number in _FULL)
    return error.errno in _FULL


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
