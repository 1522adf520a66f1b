"""How much of what a trainer prints is kept: enough for a person, too little to harm anybody.

A trainer prints into files and is never held up. Of each of its two streams lines are shipped at
``bytes_per_second`` with a ``burst``; what comes faster stays in the file and follows later. When
more than ``backlog_bytes`` wait, all but the newest are passed over, and a line says in their place
how many that were. After ``total_bytes`` the rate is ``late_bytes_per_second``. A line has
``line_bytes`` at most. What the files may take of the node's disk is bounded in ``log_files``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from octrain_worker.supervisor.lines import lines_from
from octrain_worker.supervisor.log_words import level_of, rank_of
from octrain_worker.supervisor.spool import Entry

__all__ = ["LogBudget", "LogPolicy", "LogReader"]

# What a line costs beside its text, on its way and in the database.
_LINE_COST = 100
_LINES_A_ROUND = 500
_PIECE = 1 << 20
# So much is read to count the lines that are passed over.
_COUNTED_BYTES = 256 << 20


@dataclass(frozen=True)
class LogPolicy:
    """The bounds, in bytes and seconds."""

    bytes_per_second: float = 64 << 10
    burst: float = 4 << 20
    total_bytes: float = 512 << 20
    late_bytes_per_second: float = 2 << 10
    backlog_bytes: int = 4 << 20
    kept_bytes: int = 256 << 10
    line_bytes: int = 16 << 10


class LogBudget:
    """What may be shipped now of one stream."""

    def __init__(self, policy: LogPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._left = policy.burst
        self._total = 0.0
        self._at = clock()

    def refill(self) -> None:
        """Count the time that has passed."""
        now = self._clock()
        policy = self._policy
        late = self._total >= policy.total_bytes
        rate = policy.late_bytes_per_second if late else policy.bytes_per_second
        self._left = min(self._left + (now - self._at) * rate, policy.burst)
        self._at = now

    @property
    def is_spent(self) -> bool:
        """Whether the next line must wait."""
        return self._left <= 0

    def spend(self, size: int) -> None:
        """Take a line of so many bytes out of it."""
        cost = size + _LINE_COST
        self._left -= cost
        self._total += cost
        if self._total >= self._policy.total_bytes:
            # The burst was for before.
            self._left = min(self._left, self._policy.late_bytes_per_second)


class LogReader:
    """One stream's file. It keeps no place of its own: that is in the spool, with the lines."""

    def __init__(
        self,
        stream: str,
        path: Path,
        policy: LogPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._path = path
        self._policy = policy
        self._budget = LogBudget(policy, clock)

    def entries(self, position: int, *, ended: bool) -> Iterator[Entry]:
        """The lines from ``position`` on that may be shipped now.

        When the trainer has ended nothing waits: what is left is shipped, or passed over.
        """
        try:
            size = self._path.stat().st_size
        except OSError:
            return
        self._budget.refill()
        if size < position:
            # It was emptied to spare the disk, and begins anew.
            position = 0
        if size - position > self._policy.backlog_bytes:
            left_out = self._pass_over(position, size)
            if left_out is not None:
                position = left_out.position
                yield left_out
        longest = self._policy.line_bytes
        lines = lines_from(self._path, position, ended=ended, longest=longest)
        for count, (line, end) in enumerate(lines):
            if count == _LINES_A_ROUND or (self._budget.is_spent and not ended):
                break
            self._budget.spend(len(line))
            text = line.decode("utf-8", errors="replace").replace("\0", "\ufffd")
            if end - position > longest + 1:
                text += f" [... line cut after {longest >> 10} KiB]"
            position = end
            yield Entry(_record(self._stream, text), self._stream, end)

    def _pass_over(self, position: int, size: int) -> Entry | None:
        """A line in place of those before the newest ones; None when all is one line."""
        with self._path.open("rb") as file:
            start = _line_start(file, max(size - self._policy.kept_bytes, position), size)
            if start is None or start <= position:
                return None
            lines = _count_lines(file, position, min(start, position + _COUNTED_BYTES))
        count = f"{lines:,}" if start - position <= _COUNTED_BYTES else f"more than {lines:,}"
        rate = int(self._policy.bytes_per_second) >> 10
        text = (
            f"[... {count} lines ({start - position:,} bytes) of {self._stream} left out here: it "
            f"prints faster than {rate} KiB/s; the log artifact keeps more]"
        )
        record = _record(self._stream, text) | {"level": "warning"}
        return Entry(record, self._stream, start)


def _record(stream: str, text: str) -> dict[str, Any]:
    record: dict[str, Any] = {"type": "log", "stream": stream, "time": time.time(), "text": text}
    told = {"level": level_of(text), "rank": rank_of(text)}
    return record | {name: value for name, value in told.items() if value is not None}


def _line_start(file: BinaryIO, position: int, size: int) -> int | None:
    """Where the first line that begins at or after ``position`` begins; None without one."""
    if position == 0:
        return 0
    file.seek(position - 1)
    at = position - 1
    while at < size:
        piece = file.read(_PIECE)
        if not piece:
            return None
        found = piece.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(piece)
    return None


def _count_lines(file: BinaryIO, start: int, end: int) -> int:
    file.seek(start)
    count, left = 0, end - start
    while left > 0:
        piece = file.read(min(left, _PIECE))
        if not piece:
            break
        count += piece.count(b"\n")
        left -= len(piece)
    return count
