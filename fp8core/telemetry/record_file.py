"""The file itself: whole lines with numbers without gaps, whatever a crash left at its end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8core.stored_json import decode_object

__all__ = ["RecordFile", "encode_record", "read_records"]


def read_records(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The complete records of ``path`` from byte ``offset`` on, each with the offset after it.

    A last line without its newline is still being written, and is left for the next call. A line
    that is no record, for the disk has damaged it, is passed over.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            record = decode_object(line)
            if record is not None:
                yield record, offset


def encode_record(record: dict[str, Any]) -> str:
    """A record, still without its number, as strict JSON. Raises ``TypeError``, ``ValueError``."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


class RecordFile:
    """Numbers records and appends them, each as a whole or not at all. For one thread."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size, self._seq = _cut_torn_tail(self._file)

    @property
    def last_seq(self) -> int:
        """The number of the last record in the file; 0 when there is none."""
        return self._seq

    def append(self, body: str) -> None:
        """Writes one encoded record. Raises ``OSError``, and none of it is written then."""
        line = f'{{"seq":{self._seq + 1},{body[1:]}\n'.encode()
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)
        self._seq += 1

    def close(self) -> None:
        os.close(self._file)


def _cut_torn_tail(file: int) -> tuple[int, int]:
    """Truncates ``file`` after its last whole record; returns its size and that record's seq.

    After a power cut the tail may be half a line, or zeros where the data never arrived; both go.
    """
    size = os.fstat(file).st_size
    window = 1 << 16
    while True:
        start = max(0, size - window)
        tail = os.pread(file, size - start, start)
        end = len(tail)
        while end > 0:
            newline = tail.rfind(b"\n", 0, end)
            if newline < 0:
                break
            begin = tail.rfind(b"\n", 0, newline) + 1
            if begin == 0 and start > 0:
                break  # the line begins before the window
            seq = _seq_of(tail[begin:newline])
            if seq is not None:
                keep = start + newline + 1
                if keep < size:
                    os.ftruncate(file, keep)
                return keep, seq
            end = begin
        if start == 0:
            os.ftruncate(file, 0)
            return 0, 0
        window *= 4


def _seq_of(line: bytes) -> int | None:
    seq = (decode_object(line) or {}).get("seq")
    return seq if type(seq) is int else None
