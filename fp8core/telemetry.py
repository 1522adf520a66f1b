"""The trainer's one output channel: an append-only local file of numbered records.

One JSON object a line, ``{"seq", "time", "type", ...}``. Whoever ships the file (or nobody) is no
concern of the writer: it appends with one ``write`` a record, never syncs, never waits for a
network. ``seq`` counts from 1 without gaps and goes on after a restart; a line torn by a crash is
cut off when the file is opened again. No torch here: the supervisor imports this module too.

Record types and their fields:

=============  ====================================================================
``phase``      ``phase``: loading, reference, converting, training, evaluating or saving
``metrics``    ``step``, ``values``: name to number (NaN and infinities as strings)
``progress``   ``step``, ``total_steps``, ``tokens``, ``eta_seconds`` (null: unknown)
``event``      ``kind``, ``message``, ``data``
``checkpoint`` ``step``, ``path`` (relative to the workdir), ``kind`` (periodic, final,
               stop), ``best``, ``metric``
``artifact``   ``kind`` (model, report, conversion, checkpoint), ``path``, ``step``
=============  ====================================================================
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["TelemetryWriter", "decode_number", "encode_number", "read_records"]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# While the disk is full, this many records wait in memory; then the least important are dropped.
_MAX_PENDING = 4096
_MAX_TEXT = 16_384
_DROPPABLE = frozenset({"metrics", "progress"})
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def encode_number(value: float) -> float | int | str:
    """``value`` as JSON can carry it: NaN and the infinities become strings."""
    if isinstance(value, int) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_number(value: float | int | str) -> float:
    """The number that ``encode_number`` wrote. Raises ``ValueError`` for any other string."""
    if isinstance(value, str):
        if value not in _NON_FINITE:
            raise ValueError(f"{value!r} is not a number")
        return _NON_FINITE[value]
    return float(value)


def read_records(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The complete records of ``path`` from byte ``offset`` on, each with the offset after it.

    A last line without its newline is still being written, and is left for the next call.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield json.loads(line), offset


class TelemetryWriter:
    """Appends records to ``path``; safe to call from several threads of one process.

    A full disk does not raise: records wait in memory (at most 4,096, then metrics and progress
    are dropped, oldest first) and are written when there is room again, followed by an event
    ``telemetry_dropped`` with the count if any were lost.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size, self._seq = _cut_torn_tail(self._file)

    @property
    def last_seq(self) -> int:
        """The number of the last record written; 0 when there is none."""
        return self._seq

    def phase(self, phase: str) -> None:
        self._append({"type": "phase", "phase": phase})

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        encoded = {name: encode_number(value) for name, value in values.items()}
        if encoded:
            self._append({"type": "metrics", "step": step, "values": encoded})

    def progress(self, step: int, total_steps: int, tokens: int, eta_seconds: float | None) -> None:
        self._append(
            {
                "type": "progress",
                "step": step,
                "total_steps": total_steps,
                "tokens": tokens,
                "eta_seconds": eta_seconds,
            }
        )

    def event(self, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        self._append(
            {"type": "event", "kind": kind, "message": message[:_MAX_TEXT], "data": data or {}}
        )

    def checkpoint(
        self, step: int, path: str, *, kind: str, best: bool, metric: float | None
    ) -> None:
        self._append(
            {
                "type": "checkpoint",
                "step": step,
                "path": path,
                "kind": kind,
                "best": best,
                "metric": metric,
            }
        )

    def artifact(self, kind: str, path: str, step: int) -> None:
        self._append({"type": "artifact", "kind": kind, "path": path, "step": step})

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                self._write_pending()
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, record: dict[str, Any]) -> None:
        with self._lock:
            if self._file < 0:
                raise ValueError("telemetry is closed")
            self._pending.append({"time": self._clock(), **record})
            self._write_pending()

    def _write_pending(self) -> None:
        while self._pending:
            if not self._write(self._pending[0]):
                self._make_room()
                return
            self._pending.popleft()
        if self._dropped:
            dropped = self._dropped
            message = f"{dropped} records of metrics and progress were dropped: the disk was full"
            data = {"count": dropped}
            record = {"type": "event", "kind": "telemetry_dropped", "message": message}
            if self._write({"time": self._clock(), **record, "data": data}):
                self._dropped = 0

    def _write(self, record: dict[str, Any]) -> bool:
        """Whether the record is in the file as a whole; if not, none of it is."""
        line = (
            json.dumps(
                {"seq": self._seq + 1, **_jsonable(record)}, separators=(",", ":"), allow_nan=False
            ).encode()
            + b"\n"
        )
        try:
            written = os.write(self._file, line)
        except OSError as error:
            if error.errno in _DISK_FULL:
                return False
            raise
        if written < len(line):
            os.ftruncate(self._file, self._size)
            return False
        self._size += len(line)
        self._seq += 1
        return True

    def _make_room(self) -> None:
        while len(self._pending) > _MAX_PENDING:
            for index, record in enumerate(self._pending):
                if record["type"] in _DROPPABLE:
                    del self._pending[index]
                    self._dropped += 1
                    break
            else:
                return  # only records that must not be lost: phases, events, checkpoints


def _jsonable(value: Any) -> Any:
    """``value`` with every non-finite number as a string, so that the line is strict JSON."""
    if isinstance(value, float):
        return encode_number(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


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
    try:
        seq = json.loads(line)["seq"]
    except (ValueError, KeyError, TypeError):
        return None
    return seq if isinstance(seq, int) else None
