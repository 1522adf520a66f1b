"""From the trainer's files to the spool: telemetry records and log lines, in bounded pieces.

The trainer prints into files, not pipes, so it never waits for its supervisor and its last words
survive it. What is not read now stays in the file and is read later; how much of what it prints is
read at all is said in ``log_policy``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8core.stored_json import decode_object
from octrain_worker.supervisor.holes import data_from
from octrain_worker.supervisor.lines import lines_from
from octrain_worker.supervisor.log_policy import LogPolicy, LogReader
from octrain_worker.supervisor.pieces import pieces_of
from octrain_worker.supervisor.spool import Entry, Spool

__all__ = ["Collector", "last_lines"]

logger = logging.getLogger(__name__)

_SHIPPED = frozenset({"phase", "metrics", "progress", "event", "checkpoint", "artifact"})


@dataclass(frozen=True)
class _Strange:
    """Lines, one after the other, that are no records this worker knows."""

    begin: int
    end: int
    beginning: bytes

    def event(self) -> dict[str, Any]:
        """Tells of all of them at once: damage is told by one event, not by one a line."""
        size = self.end - self.begin
        message = f"telemetry at byte {self.begin}: {size} bytes are no record this worker knows"
        logger.warning("%s: %r", message, self.beginning)
        return {
            "type": "event",
            "time": time.time(),
            "kind": "telemetry_unreadable",
            "message": message,
            "data": {"byte": self.begin, "bytes": size},
        }


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
        position = _kept_from(self._telemetry, self._spool.position("telemetry"))
        strange: _Strange | None = None
        for line, end in lines_from(self._telemetry, position):
            record = decode_object(line)
            kind = record.get("type") if record is not None else None
            if record is not None and isinstance(kind, str) and kind in _SHIPPED:
                if strange is not None:
                    yield strange.event(), position
                strange = None
                record.pop("seq", None)
                yield record, end
            elif strange is None:
                strange = _Strange(position, end, line[:200])
            else:
                strange = replace(strange, end=end)
            position = end
        if strange is not None:
            yield strange.event(), position


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


def _kept_from(path: Path, position: int) -> int:
    """Where the file goes on from ``position``, which may be in what gave its blocks back."""
    try:
        with path.open("rb") as file:
            found = data_from(file.fileno(), position)
    except OSError:
        return position
    return position if found is None else found
