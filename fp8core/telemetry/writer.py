"""The writer: records go into a bounded queue, and a thread of its own puts them into the file.

Whoever records waits for nothing: not for the disk, and not for a GPU, whose numbers are written
when they have arrived. Metrics are in the file within 20 ms, all else at once. While the disk
refuses, records wait in memory and are tried again. Beyond 32 MiB of them the oldest records of FP8
health are dropped. Beyond 64 MiB, some 24,000 logged steps, the oldest other metrics and progress
go too; phases, events, checkpoints and artifacts never do. What was dropped is counted, in the
metric ``telemetry/dropped`` (values since the process began) and in an event.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fp8core.telemetry.numbers import encode_number, jsonable
from fp8core.telemetry.record_file import RecordFile, encode_record
from fp8core.telemetry.waiting import Item, Waiting

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DROPPED", "TelemetryWriter"]

DROPPED = "telemetry/dropped"

_HEALTH_BYTES = 32 << 20
_MOST_BYTES = 64 << 20
_MAX_TEXT = 16_384
_NUMBER = (float, int)
# Metrics wake nobody: waking a thread may cost the one that does it a turn on a busy machine.
_LOOK_SECONDS = 0.02
_ARRIVAL_POLL_SECONDS = 0.001
_FIRST_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 1.0
# At the end, how long a disk that refuses and a GPU that does not answer are waited for.
_PATIENCE_SECONDS = 5.0


class TelemetryWriter:
    """Appends records to ``path``; safe to call from several threads of one process.

    A disk that is full or fails raises nothing: the records wait, as the module says, and when
    they are written an event ``telemetry_delayed`` tells since when and why.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        health_bytes: int = _HEALTH_BYTES,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self.path = path
        self._clock = clock
        self._file = RecordFile(path)
        self._changed = threading.Condition()
        self._waiting = Waiting(health_bytes, most_bytes)
        self._closing: float | None = None
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def last_seq(self) -> int:
        """The number of the last record written; 0 when there is none."""
        return self._file.last_seq

    @property
    def dropped(self) -> int:
        """How many values this process has dropped."""
        return self._waiting.dropped.values

    def phase(self, phase: str) -> None:
        self._append(self._waiting.kept, self._item({"type": "phase", "phase": phase}))

    def record(
        self, step: int, values: Mapping[str, float | Tensor], *, health: bool = False
    ) -> None:
        """Metrics of ``step``: numbers, or tensors of one element on any device.

        Tensors are taken as they are now, without waiting for the device. ``health``: per-layer
        FP8 health, the first to be dropped. Raises ``ValueError`` for a tensor that is no number.
        """
        if not values:
            return
        numbers: dict[str, float] = {}
        tensors: dict[str, Tensor] = {}
        for name, value in values.items():
            if isinstance(value, _NUMBER):
                numbers[name] = value
            else:
                tensors[name] = value
        scalars = None
        if tensors:
            from fp8core.telemetry.scalars import Scalars  # whoever has tensors has torch

            scalars = Scalars(tensors)
        item = Item(
            0,
            "",
            {"time": self._clock(), "type": "metrics", "step": step, "values": numbers},
            len(values),
            scalars,
        )
        self._append(self._waiting.health if health else self._waiting.figures, item)

    def progress(self, step: int, total_steps: int, tokens: int, eta_seconds: float | None) -> None:
        record = {
            "type": "progress",
            "step": step,
            "total_steps": total_steps,
            "tokens": tokens,
            "eta_seconds": eta_seconds,
        }
        self._append(self._waiting.figures, self._item(record))

    def event(self, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        self._append(self._waiting.kept, self._item(_event(kind, message, data)))

    def checkpoint(
        self, step: int, path: str, *, kind: str, best: bool, metric: float | None
    ) -> None:
        record = {
            "type": "checkpoint",
            "step": step,
            "path": path,
            "kind": kind,
            "best": best,
            "metric": metric,
        }
        self._append(self._waiting.kept, self._item(record))

    def artifact(self, kind: str, path: str, step: int) -> None:
        record = {"type": "artifact", "kind": kind, "path": path, "step": step}
        self._append(self._waiting.kept, self._item(record))

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all that was recorded before is in the file; whether it is."""
        with self._changed:
            order = self._waiting.order
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._waiting.oldest > order, timeout)

    def close(self) -> None:
        """Writes what waits. A disk that refuses is tried for five seconds more."""
        with self._changed:
            if self._closing is None:
                self._closing = time.monotonic() + _PATIENCE_SECONDS
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _item(self, record: dict[str, Any]) -> Item:
        """Made JSON at once: what the caller changes afterwards does not reach it."""
        return Item(0, encode_record(jsonable({"time": self._clock(), **record})))

    def _append(self, queue: deque[Item], item: Item) -> None:
        with self._changed:
            if self._closing is not None:
                raise ValueError("telemetry is closed")
            self._waiting.add(queue, item)
            self._waiting.make_room()
            if queue is self._waiting.kept:
                self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                self._add_scalars(item)
                if not self._write(item):
                    self._give_up()
                    break
                self._tell_dropped()
        finally:
            with self._changed:
                self._waiting.in_hand = None
                self._changed.notify_all()
            self._file.close()

    def _next(self) -> Item | None:
        """The oldest record, when there is one; None when there will be none."""
        with self._changed:
            self._waiting.in_hand = None
            self._changed.notify_all()
            while True:
                item = self._waiting.take()
                if item is not None:
                    return item
                if self._closing is not None:
                    return None
                self._changed.wait(_LOOK_SECONDS)

    def _add_scalars(self, item: Item) -> None:
        """The numbers of a device, when they have arrived. A device that fails or hangs has none:
        what else is recorded must still be written."""
        if item.scalars is None or item.metrics is None:
            return
        values = item.metrics["values"]
        try:
            while not item.scalars.arrived:
                if self._closing is not None and time.monotonic() > self._closing:
                    raise TimeoutError("the device did not answer")
                time.sleep(_ARRIVAL_POLL_SECONDS)
            values.update(item.scalars.read())
        except (RuntimeError, TimeoutError):
            with self._changed:
                self._waiting.dropped.add(item.values - len(values))

    def _write(self, item: Item) -> bool:
        """Whether the record is in the file; if not, the time to try is over."""
        body = item.body
        if item.metrics is not None:
            values = item.metrics["values"]
            if not values:
                return True
            if self._waiting.dropped.unreported_values:
                values[DROPPED] = self._waiting.dropped.report_values()
            encoded = {name: encode_number(value) for name, value in values.items()}
            body = encode_record({**item.metrics, "values": encoded})
        since: float | None = None
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                self._file.append(body)
            except OSError as error:
                problem, now = error.strerror or str(error), time.monotonic()
                since = now if since is None else since
                if self._closing is not None and now > self._closing:
                    return False
                self._pause(pause)
                pause = min(pause * 2, _LONGEST_RETRY_SECONDS)
                continue
            if since is not None:
                seconds = round(time.monotonic() - since, 3)
                text = f"records waited in memory for {seconds:.1f} s: {problem}"
                data = {"seconds": seconds, "error": problem}
                self._append_own(_event("telemetry_delayed", text, data))
            return True

    def _pause(self, seconds: float) -> None:
        """Sleeps; the end of the run is waited for in short steps."""
        with self._changed:
            if self._closing is None:
                self._changed.wait_for(lambda: self._closing is not None, seconds)
                return
        time.sleep(_FIRST_RETRY_SECONDS)

    def _tell_dropped(self) -> None:
        """Once the queue has room again: the whole of a gap is told at once."""
        with self._changed:
            if not self._waiting.dropped.untold or not self._waiting.has_room:
                return
            message, data = self._waiting.dropped.tell()
        self._append_own(_event("telemetry_dropped", message, data))

    def _append_own(self, record: dict[str, Any]) -> None:
        with self._changed:
            self._waiting.add(self._waiting.kept, self._item(record))

    def _give_up(self) -> None:
        with self._changed:
            lost = 1 + self._waiting.count
            self._waiting.clear()
        print(f"{lost} telemetry records could not be written to {self.path}", file=sys.stderr)


def _event(kind: str, message: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"type": "event", "kind": kind, "message": message[:_MAX_TEXT], "data": data or {}}
