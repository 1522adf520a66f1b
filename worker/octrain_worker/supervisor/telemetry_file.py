"""The trainer's telemetry file, bounded on the node's disk however long the run is.

The trainer appends to it for as long as it lives, so it cannot be moved away. Once it takes more
than a limit, what nobody needs any more gives its blocks back, as a hole: what the spool has, and
every sink of the job has sent. A sink whose server is away holds that up to four times the limit;
then what the spool has goes all the same, and the sink tells how much it has lost. Where the file
system makes no holes the file is left whole.

Checkpoints and artifacts that were announced in what goes are written down beside the file first: a
successor of this supervisor takes up from there what had not been stored yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fp8core.stored_json import decode_object, read_object
from octrain_worker.attempt_folder import AttemptFolder
from octrain_worker.supervisor.holes import aligned, data_from, punch_hole
from octrain_worker.supervisor.lines import LONGEST_LINE

__all__ = ["SINKS", "TELEMETRY_BYTES", "TelemetryFile"]

logger = logging.getLogger(__name__)

# The fields of a spec's ``telemetry`` that switch a sink on.
SINKS = ("tensorboard", "mlflow", "wandb")
# An hour of 500 series every ten steps, at ten steps a second, is not yet as much.
TELEMETRY_BYTES = 256 << 20
# So many times the limit a sink that is behind may hold.
_PATIENCE = 4
# A sixteenth of the limit, its end, stays: the last step is read from there.
_TAIL_SHARE = 16
_ANNOUNCED = (b'"type":"checkpoint"', b'"type":"artifact"')
_PIECE = 1000

Records = list[dict[str, Any]]


class TelemetryFile:
    """``telemetry.jsonl`` in the workdir of an attempt. ``sinks``: kinds that its job has."""

    def __init__(
        self, folder: AttemptFolder, sinks: Sequence[str] = (), *, limit: int = TELEMETRY_BYTES
    ) -> None:
        self.path = folder.work / "telemetry.jsonl"
        self._announced = folder.path / "announced.jsonl"
        self._sinks = [folder.work / "sinks" / f"{kind}.json" for kind in sinks]
        self._limit = limit
        self._holes = True

    def shorten(self, taken: int) -> None:
        """Bounds the file, of which the spool has the first ``taken`` bytes. Errors are logged."""
        try:
            found = self.path.stat()
            size = found.st_blocks * 512
            if size <= self._limit or not self._holes:
                return
            end = min(taken, found.st_size - self._limit // _TAIL_SHARE)
            if size <= _PATIENCE * self._limit:
                end = min([end, *(_offset(state) for state in self._sinks)])
            self._let_go(aligned(end))
        except FileNotFoundError:
            return
        except OSError as error:
            logger.error("%s cannot be shortened: %s", self.path, error)

    def _let_go(self, end: int) -> None:
        with self.path.open("rb") as file:
            start = data_from(file.fileno(), 0)
            # Not for every block that is free again.
            if start is None or end - start < self._limit // _TAIL_SHARE:
                return
            self._write_down(file, start, end)
        if not punch_hole(self.path, 0, end):
            self._holes = False
            logger.warning("%s stays whole: its file system makes no holes", self.path)

    def _write_down(self, file: BinaryIO, start: int, end: int) -> None:
        """Keeps the announcements between two offsets, and the one that reaches over the end."""
        lines = _lines(file, start, end)
        kept = [line for line in lines if any(mark in line for mark in _ANNOUNCED)]
        if kept:
            with self._announced.open("ab") as target:
                # Behind what a crash may have torn: that must not take the next line with it.
                target.write(b"\n" + b"".join(kept))
                target.flush()
                os.fsync(target.fileno())

    def records(self) -> Iterator[Records]:
        """The whole records that are still there, in pieces, after what was announced in those
        that are not; lines that are none are passed over.
        """
        for path in (self._announced, self.path):
            try:
                file = path.open("rb")
            except OSError:
                continue
            with file:
                piece: Records = []
                for line in _lines(file, 0):
                    record = _record(line)
                    if record is not None:
                        piece.append(record)
                    if len(piece) == _PIECE:
                        yield piece
                        piece = []
                if piece:
                    yield piece


def _lines(file: BinaryIO, start: int, end: int | None = None) -> Iterator[bytes]:
    """Lines that begin before ``end``, from the first byte from ``start`` on that is in no hole."""
    offset = data_from(file.fileno(), start)
    if offset is None:
        return
    file.seek(offset)
    # In pieces where a line is none: a file of zeros is one.
    while line := file.readline(LONGEST_LINE):
        if end is not None and offset >= end:
            return
        yield line
        offset += len(line)


def _record(line: bytes) -> dict[str, Any] | None:
    record = decode_object(line)
    return record if record is not None and isinstance(record.get("type"), str) else None


def _offset(state: Path) -> int:
    """How far a sink has come, as it has written down."""
    offset = (read_object(state) or {}).get("offset")
    return offset if type(offset) is int else 0
