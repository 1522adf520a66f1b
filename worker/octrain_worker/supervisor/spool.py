"""The spool: every record of an attempt, numbered, on disk until the API has it.

Records of several sources (telemetry, stdout, stderr, the supervisor's events) get one numbering
from 1 without gaps. Each line also says how far its source had been read, so after a crash nothing
is read twice or skipped: source position and record are one write. Lines are synced before anything
is sent, so a number never means two different records.

Segments are files named after their first number; one is removed when the API has all of it, except
the newest, whose first line keeps the positions.

A disk may damage what lies on it. What can be read is sent all the same; a number whose record
cannot be read goes as a record ``lost`` (the API takes no gap), and the last of such a row as the
event ``spool_damaged``: so it is told once, and only where the API lacks one of them. The file is
kept for a person. After a damaged end of the newest segment as many numbers are passed over as it
may have held, for they may have been sent; what came from the trainer's files there is read from
them again, and may then be told twice. Where no position of a source is left its file is read from
its beginning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octrain_worker.supervisor.segment import SHORTEST_LINE, lines_of, sealed, survey

__all__ = ["Entry", "Spool"]

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class _Place:
    """Where a reading goes on: ``number`` is next, ``expected`` the one due at the offset."""

    number: int
    segment: int
    offset: int
    expected: int


class Spool:
    """Appends from one thread, reads and acknowledges from another.

    ``append`` raises ``OSError`` when the disk is full, and has then written nothing. Segments that
    are damaged are kept in ``damaged`` (a folder ``damaged`` of the spool's without it).
    """

    def __init__(
        self,
        folder: Path,
        *,
        damaged: Path | None = None,
        segment_bytes: int = 4 << 20,
        mask: Callable[[bytes], bytes] = lambda line: line,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._damaged = damaged if damaged is not None else folder / "damaged"
        self._segment_bytes = segment_bytes
        # What every record goes through before it is written, and so before it is sent.
        self._mask = mask
        self._lock = threading.Lock()
        self._positions: dict[str, int] = {}
        self._last = 0
        # Where the last read stopped.
        self._cursor: _Place | None = None
        self._segments = sorted(
            int(path.stem)
            for path in folder.glob("*.jsonl")
            if path.stem.isascii() and path.stem.isdigit()
        )
        self._acknowledged = _read_number(folder / "acknowledged")
        self._recover()
        # A little more than is here: the end of the newest segment was lost, and the API has it.
        if self._last < self._acknowledged <= self._last + self._most_in(2 * segment_bytes):
            self._last = self._acknowledged
            self._begin_segment()
        # What was before the oldest segment is not here, because the API has it.
        oldest = self._segments[0] - 1
        if not oldest <= self._acknowledged <= self._last:
            self._acknowledged = oldest

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
                lines.append(sealed(self._mask(_line(line))))
            self._write(b"".join(lines))
            self._positions = positions
            self._last += len(lines)

    def read(
        self, after: int, *, limit: int = 500, max_bytes: int = 512 << 10
    ) -> tuple[int, list[dict[str, Any]]]:
        """Records after number ``after``: the first one's number, and at most ``limit`` of them.

        At least one is returned, if there is one, however large. Raises ``OSError`` for what may
        pass, such as too many open files.
        """
        with self._lock:
            first = after + 1
            records: list[dict[str, Any]] = []
            total = 0
            if first > self._last:
                return first, records
            for record, size, place in self._from(first):
                if records and total + size > max_bytes:
                    break
                records.append(record)
                total += size
                self._cursor = place
                if len(records) == limit or total >= max_bytes:
                    break
            return first, records

    def acknowledge(self, number: int) -> None:
        """The API has everything up to ``number``."""
        with self._lock:
            if number <= self._acknowledged:
                return
            self._acknowledged = number
            if number > self._last:
                # It was cut off: these numbers had been given before.
                logger.warning("the API has %d records, the spool %d", number, self._last)
                self._last = number
                with contextlib.suppress(OSError):
                    self._begin_segment()
            # Unsynced, or not at all on a full disk: an older number only means that some records
            # are sent again, and skipped.
            partial = self._folder / ".acknowledged"
            with contextlib.suppress(OSError):
                partial.write_text(str(number))
                partial.replace(self._folder / "acknowledged")
            while len(self._segments) > 1 and self._segments[1] <= number + 1:
                with contextlib.suppress(OSError):
                    self._path(self._segments.pop(0)).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._file)

    def _recover(self) -> None:
        """Opens the newest segment whose first line is whole; cuts off it a torn last line, and the
        pieces before that: none of one write has been sent while a line of it is missing. Begins a
        new one after a damaged one.
        """
        self._file = -1
        self._size = 0
        while self._segments:
            newest = self._segments[-1]
            path = self._path(newest)
            found = survey(path, newest)
            self._positions = found.positions
            if found.damaged:
                self._go_on_after(newest, found.last, found.lost_end, found.complete)
            elif not found.whole:
                path.unlink()
                self._segments.pop()
                self._last = newest - 1
                continue
            else:
                self._last = max(self._last, found.whole_last)
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                os.ftruncate(self._file, found.whole)
                self._size = found.whole
            return
        self._begin_segment()

    def _go_on_after(self, newest: int, last: int, lost_end: int, complete: bool) -> None:
        """Begins a segment after the newest one, which is damaged."""
        self._keep(newest)
        for number in reversed(self._segments[:-1]):
            if complete:
                break
            earlier = survey(self._path(number), number)
            self._positions = {**earlier.positions, **self._positions}
            complete = earlier.complete
        # No more than one segment and one write; a larger file has grown by the damage.
        last += self._most_in(min(lost_end, 2 * self._segment_bytes))
        self._last = max(self._last, newest, last)
        self._begin_segment()

    @staticmethod
    def _most_in(size: int) -> int:
        return size // SHORTEST_LINE

    def _begin_segment(self) -> None:
        number = self._last + 1
        if self._segments and self._segments[-1] == number:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC
        previous = self._file, self._size
        self._file, self._size = os.open(self._path(number), flags, 0o600), 0
        try:
            self._write(sealed(_line({"positions": self._positions})))
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

    def _from(self, first: int) -> Iterator[tuple[dict[str, Any], int, _Place]]:
        """Every record from number ``first`` on, its size, and where reading goes on after it."""
        place = self._find(first)
        expected, offset = place.expected, place.offset
        for index in range(self._segments.index(place.segment), len(self._segments)):
            segment = self._segments[index]
            if expected < segment:
                yield from self._lost(first, _Place(first, segment, 0, expected), segment - 1, 0)
                expected = segment
            following = self._segments[index + 1 : index + 2]
            end = following[0] if following else self._last + 1
            begin, damaged = offset, 0
            for line in lines_of(self._path(segment), offset, expected, end):
                if isinstance(line, int):
                    damaged = line
                    break
                place = _Place(first, segment, line.begin, expected)
                yield from self._lost(first, place, line.seq - 1, line.damaged)
                expected, begin = line.seq + 1, line.end
                if line.seq >= first:
                    place = _Place(expected, segment, begin, expected)
                    yield line.record, line.end - line.begin - line.damaged, place
            yield from self._lost(first, _Place(first, segment, begin, expected), end - 1, damaged)
            expected, offset = end, 0

    def _lost(
        self, first: int, place: _Place, last: int, damaged: int
    ) -> Iterator[tuple[dict[str, Any], int, _Place]]:
        """What is sent for the numbers up to ``last``, of which from ``place`` on no record is
        here: all were among ``damaged`` bytes, or in a file that is gone."""
        lowest = place.expected
        if damaged:
            self._keep(place.segment)
        for number in range(max(lowest, first), last + 1):
            record: dict[str, Any] = {"type": "lost"}
            if number == last:
                count = last + 1 - lowest
                kept = self._damaged / self._path(place.segment).name
                record = _loss(kept, count, damaged)
            yield record, SHORTEST_LINE, _Place(number + 1, place.segment, place.offset, lowest)

    def _find(self, first: int) -> _Place:
        place = self._cursor
        if place is not None and place.number == first and place.segment in self._segments:
            return place
        begun = [number for number in self._segments if number <= first]
        segment = begun[-1] if begun else self._segments[0]
        return _Place(first, segment, 0, min(first, segment))

    def _keep(self, segment: int) -> None:
        """Keeps a damaged segment for a person, without room of its own on the disk."""
        path = self._path(segment)
        kept = self._damaged / path.name
        if not path.is_file() or kept.exists():
            return
        try:
            self._damaged.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.link(path, kept)
        except OSError as error:
            logger.error("%s is damaged, and cannot be kept: %s", path, error)
        else:
            logger.error("%s is damaged: it is kept as %s", path, kept)

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:012d}.jsonl"


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _loss(kept: Path, count: int, damaged: int) -> dict[str, Any]:
    """The event that tells of records that were lost. It names no folder of the node's: whoever
    sees the job sees it."""
    name = kept.name
    what = f"{count:,} records that may not have been sent"
    if damaged:
        message = (
            f"{damaged:,} bytes of the spool's file {name} cannot be read, and with them {what}"
        )
        if kept.exists():
            message += f"; the node keeps the file as {kept.parent.name}/{name} of the attempt"
    else:
        message = f"{what} are missing before the spool's file {name}, or at its end"
    data = {"bytes": damaged, "records": count, "file": name}
    return {
        "type": "event",
        "time": time.time(),
        "kind": "spool_damaged",
        "message": message,
        "data": data,
    }


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
