"""The spool: every record of an attempt, numbered, on disk until the API has it.

Records of several sources (telemetry, stdout, stderr, the supervisor's events) get one numbering
from 1 without gaps. Each line also says how far its source had been read, so after a crash nothing
is read twice or skipped: source position and record are one write. Lines are synced before anything
is sent, so a number never means two different records.

Segments are files named after their first number; one is removed when the API has all of it, except
the newest, whose first line keeps the positions.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Entry", "Spool"]


@dataclass(frozen=True)
class Entry:
    """A record, and the byte offset up to which its source is then consumed (None: no source).

    One that ``goes_on`` is a piece of what the source has, and the next entry is the next piece: a
    crash between the two loses both, and they are read again.
    """

    record: dict[str, Any]
    source: str | None = None
    position: int = 0
    goes_on: bool = False


class Spool:
    """Appends from one thread, reads and acknowledges from another.

    ``append`` raises ``OSError`` when the disk is full, and has then written nothing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = 4 << 20,
        mask: Callable[[bytes], bytes] = lambda line: line,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        # What every record goes through before it is written, and so before it is sent.
        self._mask = mask
        self._lock = threading.Lock()
        self._positions: dict[str, int] = {}
        self._last = 0
        self._acknowledged = _read_number(folder / "acknowledged")
        # Where the last read stopped: the number that comes next, its segment, its byte offset.
        self._cursor: tuple[int, int, int] | None = None
        self._segments = sorted(
            int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit()
        )
        self._recover()

    @property
    def last_seq(self) -> int:
        return self._last

    @property
    def acknowledged_seq(self) -> int:
        return self._acknowledged

    def position(self, source: str) -> int:
        """The byte offset up to which ``source`` is in the spool."""
        return self._positions.get(source, 0)

    def append(self, entries: Sequence[Entry]) -> None:
        """Numbers the records and puts them on disk."""
        if not entries:
            return
        with self._lock:
            if self._size >= self._segment_bytes:
                self._begin_segment()
            positions = dict(self._positions)
            lines = []
            for number, entry in enumerate(entries, start=self._last + 1):
                line: dict[str, Any] = {"seq": number, "record": entry.record}
                if entry.source is not None:
                    positions[entry.source] = entry.position
                    line["from"] = [entry.source, entry.position]
                if entry.goes_on:
                    line["goes_on"] = True
                lines.append(self._mask(_line(line)))
            self._write(b"".join(lines))
            self._positions = positions
            self._last += len(lines)

    def read(
        self, after: int, *, limit: int = 500, max_bytes: int = 512 << 10
    ) -> tuple[int, list[dict[str, Any]]]:
        """Records after number ``after``: the first one's number, and at most ``limit`` of them.

        At least one is returned, if there is one, however large.
        """
        with self._lock:
            first = max(after + 1, self._segments[0])
            if first > self._last:
                return first, []
            segment, offset = self._find(first)
            records: list[dict[str, Any]] = []
            total = 0
            while segment is not None and len(records) < limit and total < max_bytes:
                with self._path(segment).open("rb") as file:
                    file.seek(offset)
                    for line in file:
                        value = json.loads(line)
                        if value.get("seq", 0) >= first:
                            if len(records) == limit or (records and total + len(line) > max_bytes):
                                total = max_bytes
                                break
                            records.append(value["record"])
                            total += len(line)
                        offset += len(line)
                self._cursor = (first + len(records), segment, offset)
                if total >= max_bytes:
                    break
                following = [number for number in self._segments if number > segment]
                segment, offset = (following[0] if following else None), 0
            return first, records

    def acknowledge(self, number: int) -> None:
        """The API has everything up to ``number``."""
        with self._lock:
            if number <= self._acknowledged:
                return
            self._acknowledged = number
            # Unsynced, or not at all on a full disk: an older number only means that some records
            # are sent again, and skipped.
            partial = self._folder / ".acknowledged"
            with contextlib.suppress(OSError):
                partial.write_text(str(number))
                partial.replace(self._folder / "acknowledged")
            while len(self._segments) > 1 and self._segments[1] <= number + 1:
                self._path(self._segments.pop(0)).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._file)

    def _recover(self) -> None:
        """Opens the newest segment whose first line is whole; cuts off it a torn last line, and the
        pieces before that: none of one write has been sent while a line of it is missing.
        """
        while self._segments:
            path = self._path(self._segments[-1])
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if not whole:
                path.unlink()
                self._segments.pop()
                continue
            first, *lines = whole.splitlines(keepends=True)
            self._positions = dict(json.loads(first)["positions"])
            self._last = self._segments[-1] - 1
            kept = end = len(first)
            for line in lines:
                value = json.loads(line)
                end += len(line)
                if value.get("goes_on"):
                    continue
                kept = end
                self._last = value["seq"]
                if "from" in value:
                    source, position = value["from"]
                    self._positions[source] = position
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.ftruncate(self._file, kept)
            self._size = kept
            return
        self._file = -1
        self._size = 0
        self._begin_segment()

    def _begin_segment(self) -> None:
        number = self._last + 1
        if self._segments and self._segments[-1] == number:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC
        previous = self._file, self._size
        self._file, self._size = os.open(self._path(number), flags, 0o600), 0
        try:
            self._write(_line({"positions": self._positions}))
        except OSError:
            os.close(self._file)
            self._path(number).unlink()
            self._file, self._size = previous
            raise
        if previous[0] >= 0:
            os.close(previous[0])
        self._segments.append(number)

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _find(self, first: int) -> tuple[int | None, int]:
        cursor = self._cursor
        if cursor is not None and cursor[0] == first and cursor[1] in self._segments:
            return cursor[1], cursor[2]
        return max(number for number in self._segments if number <= first), 0

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:012d}.jsonl"


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
