"""From the trainer's files to the spool: telemetry records and log lines, in bounded pieces.

The trainer prints into files, not pipes, so it never waits for its supervisor and its last words
survive it. What is not read now stays in the file and is read later; how much of what it prints is
read at all is said in ``log_policy``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octrain_worker.supervisor.lines import lines_from
from octrain_worker.supervisor.log_policy import LogPolicy, LogReader
from octrain_worker.supervisor.pieces import pieces_of
from octrain_worker.supervisor.spool import Entry, Spool

__all__ = ["Collector", "last_lines"]

logger = logging.getLogger(__name__)

_SHIPPED = frozenset({"phase", "metrics", "progress", "event", "checkpoint", "artifact"})


class Collector:
    """Reads what the trainer wrote since last time, spools it, returns the telemetry part."""

    def __init__(
        self,
        spool: Spool,
        *,
        telemetry: Path,
        logs: dict[str, Path],
        policy: LogPolicy = LogPolicy(),  # noqa: B008 - immutable
    ) -> None:
        self._spool = spool
        self._telemetry = telemetry
        self._logs = {stream: LogReader(stream, path, policy) for stream, path in logs.items()}
        self._unreadable = 0

    def collect(self, *, ended: bool = False) -> list[dict[str, Any]]:
        """One round. With ``ended`` a last line without its newline is a line too.

        Raises ``OSError`` (a full disk) with nothing consumed, so a later round reads it again.
        """
        entries: list[Entry] = []
        for stream, log in self._logs.items():
            entries.extend(log.entries(self._spool.position(stream), ended=ended))
        records = []
        for record, position in self._telemetry_records():
            *pieces, last = pieces_of(record)
            entries.extend(Entry(piece, goes_on=True) for piece in pieces)
            entries.append(Entry(last, "telemetry", position))
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
        for line, end in lines_from(self._telemetry, position):
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


def last_lines(paths: list[Path], count: int, *, max_bytes: int = 256 << 10) -> str:
    """The last ``count`` lines of the files taken together, the last file's being the last.

    Of each file ``max_bytes`` are read, and of each line 500 characters.
    """
    lines: list[str] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - max_bytes))
                data = file.read()
        except OSError:
            continue
        lines.extend(data.decode("utf-8", errors="replace").replace("\0", "\ufffd").splitlines())
    return "\n".join(line[:500] for line in lines[-count:])


def _event(kind: str, message: str) -> dict[str, Any]:
    return {"type": "event", "time": time.time(), "kind": kind, "message": message, "data": {}}
