"""From the trainer's files to the spool: telemetry records and log lines, in bounded pieces.

The trainer prints into files, not pipes, so it never waits for its supervisor and its last words
survive it. What is not read now stays in the file and is read later; only when a log runs away is
part of it left to the log artifact.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octrain_worker.supervisor.spool import Entry, Spool

__all__ = ["MAX_LINE_BYTES", "Collector", "last_lines"]

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 << 10
_CUT = " [... line cut after 16 KiB]"
_READ_BYTES = 1 << 20
_MAX_LOG_LINES = 500  # of one stream in one round
_RUNAWAY_BYTES = 8 << 20
_SHIPPED = frozenset({"phase", "metrics", "progress", "event", "checkpoint", "artifact"})


class Collector:
    """Reads what the trainer wrote since last time, spools it, returns the telemetry part."""

    def __init__(self, spool: Spool, *, telemetry: Path, logs: dict[str, Path]) -> None:
        self._spool = spool
        self._telemetry = telemetry
        self._logs = logs
        self._unreadable = 0

    def collect(self, *, ended: bool = False) -> list[dict[str, Any]]:
        """One round. With ``ended`` a last line without its newline is a line too.

        Raises ``OSError`` (a full disk) with nothing consumed, so a later round reads it again.
        """
        entries: list[Entry] = []
        for stream, path in self._logs.items():
            entries.extend(self._log_entries(stream, path, ended=ended))
        records = []
        for record, position in self._telemetry_records():
            entries.append(Entry(record, "telemetry", position))
            records.append(record)
        self._spool.append(entries)
        return records

    def drain(self) -> list[dict[str, Any]]:
        """All that is left after the trainer's end."""
        records: list[dict[str, Any]] = []
        while True:
            before = self._spool.last_seq
            records.extend(self.collect(ended=True))
            if self._spool.last_seq == before:
                return records

    def _telemetry_records(self) -> Iterator[tuple[dict[str, Any], int]]:
        position = self._spool.position("telemetry")
        for line, end in _lines(self._telemetry, position):
            try:
                record = json.loads(line)
                known = record["type"] in _SHIPPED
            except (ValueError, KeyError, TypeError):
                known = False
            if known:
                record.pop("seq", None)
                yield record, end
                continue
            self._unreadable += 1
            message = f"telemetry record at byte {position} is not one this worker knows"
            logger.warning("%s: %r", message, line[:200])
            yield _event("telemetry_unreadable", message), end

    def _log_entries(self, stream: str, path: Path, *, ended: bool) -> Iterator[Entry]:
        position = self._spool.position(stream)
        try:
            size = path.stat().st_size
        except OSError:
            return
        if size - position > _RUNAWAY_BYTES:
            skipped_to = size - _READ_BYTES
            text = f"[... {skipped_to - position} bytes left out here; the log artifact has them]"
            position = skipped_to
            yield Entry(_log(stream, text), stream, position)
        # Only so much more than a line, that an endless line is cut without being read whole.
        for count, (line, end) in enumerate(
            _lines(path, position, ended=ended, longest=MAX_LINE_BYTES)
        ):
            if count == _MAX_LOG_LINES:
                return
            text = line.decode("utf-8", errors="replace").replace("\0", "\ufffd")
            if end - position > MAX_LINE_BYTES + 1:
                text += _CUT
            position = end
            yield Entry(_log(stream, text), stream, end)


def last_lines(paths: list[Path], count: int, *, max_bytes: int = 16 << 10) -> str:
    """The last ``count`` lines of the files taken together, the last file's being the last."""
    lines: list[str] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - max_bytes))
                data = file.read()
        except OSError:
            continue
        lines.extend(data.decode("utf-8", errors="replace").replace("\0", "\ufffd").splitlines())
    return "\n".join(line[:500] for line in lines[-count:])[-max_bytes:]


def _lines(
    path: Path, position: int, *, ended: bool = False, longest: int | None = None
) -> Iterator[tuple[bytes, int]]:
    """Lines from ``position`` on, without their newline, each with the offset after it.

    A line longer than ``longest`` is given as its beginning; its offset is after all of it, or
    after what is there of it so far (the rest is then a line of its own).
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(position)
        data = file.read(_READ_BYTES)
        while longest is None and data and b"\n" not in data:
            more = file.read(_READ_BYTES)
            if not more:
                break
            data += more
    start = 0
    while start < len(data):
        newline = data.find(b"\n", start)
        if newline >= 0:
            end = newline + 1
            line = data[start:newline]
        elif ended or (longest is not None and len(data) - start > longest):
            end = len(data)
            line = data[start:]
        else:
            return
        yield line.rstrip(b"\r")[:longest], position + end
        start = end


def _log(stream: str, text: str) -> dict[str, Any]:
    return {"type": "log", "stream": stream, "time": time.time(), "text": text}


def _event(kind: str, message: str) -> dict[str, Any]:
    return {"type": "event", "time": time.time(), "kind": kind, "message": message, "data": {}}
