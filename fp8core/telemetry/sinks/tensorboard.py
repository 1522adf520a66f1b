"""TensorBoard's event files, by TensorBoard's own writer, which needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from fp8core.telemetry.numbers import decode_number

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    """One more event file in ``folder``, a scalar for each metric."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            if record["type"] == "metrics":
                values = [
                    Summary.Value(tag=name, simple_value=decode_number(value))
                    for name, value in record["values"].items()
                ]
                self._add(record, record["step"], summary=Summary(value=values))
            elif record["type"] == "event" and record["kind"] == "resumed":
                # What an earlier run wrote of the steps that now come again is not shown any more.
                start = SessionLog(status=SessionLog.START)
                self._add(record, int(record["data"]["step"]) + 1, session_log=start)
        self._writer.flush()

    def state(self) -> dict[str, Any]:
        return {}

    def close(self, outcome: str) -> None:
        self._writer.close()

    def _add(self, record: dict[str, Any], step: int, **content: Any) -> None:
        self._writer.add_event(Event(wall_time=record["time"], step=step, **content))
