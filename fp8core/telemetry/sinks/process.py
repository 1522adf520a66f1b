"""A sink's own process: reads the telemetry file from where it was, and sends what is new.

Told what to do by the first line of its standard input; when that ends, it sends the rest and ends
too. It says on standard output, a line of JSON each time, how far it is and what is in its way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fp8core.stored_json import decode_object, read_object
from fp8core.telemetry.numbers import decode_number
from fp8core.telemetry.sinks.sink import Sink, SinkRefused

__all__ = ["run_sink"]

_READ_BYTES = 1 << 20
_LOOK_SECONDS = 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
# After the end: longer than any trainer waits, for a sink whose trainer is gone.
_LAST_SECONDS = 120.0
# Of a record's time, in seconds since the epoch; the year 5138.
_LATEST = 1e11


def run_sink(kind: str) -> int:
    """The process's whole life; its exit code."""
    ended = threading.Event()
    # Ctrl-C reaches the whole group: the trainer decides about the end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    order = json.loads(sys.stdin.readline())
    outcome: list[str] = []
    threading.Thread(target=_wait_for_end, args=(outcome, ended), daemon=True).start()
    try:
        _follow(kind, order, outcome, ended)
    except Exception as error:
        _say(problem=_words(error), final=True)
        return 1
    return 0


def _follow(kind: str, order: dict[str, Any], outcome: list[str], ended: threading.Event) -> None:
    state_file, telemetry = Path(order["state"]), Path(order["telemetry"])
    state = _read_state(state_file)
    told = state.pop("offset", 0)
    offset = min(told, telemetry.stat().st_size) if type(told) is int and told >= 0 else 0
    step = 0
    sink = _retrying(lambda: _make(kind, order, state), ended)
    while True:
        finishing = ended.is_set()
        begin = _kept_from(telemetry, offset)
        if begin > offset:
            _say(lost=begin - offset)
        records, offset, damaged = _read(telemetry, begin)
        if damaged:
            _say(damaged=damaged)
        if records:
            step = max([step, *(r["step"] for r in records if isinstance(r.get("step"), int))])
            _retrying(lambda: sink.write(records), ended)  # noqa: B023 - called at once
            _write_state(state_file, {**sink.state(), "offset": offset})
            _say(offset=offset, step=step)
        elif finishing and offset == begin:
            break
        elif offset == begin:
            ended.wait(_LOOK_SECONDS)
    sink.close(outcome[0] if outcome else "lost")


def _make(kind: str, order: dict[str, Any], state: dict[str, Any]) -> Sink:
    if kind == "tensorboard":
        from fp8core.telemetry.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(Path(order["folder"]))
    if kind == "mlflow":
        from fp8core.telemetry.sinks.mlflow import MlflowSink

        return MlflowSink(order["settings"], order["spec"], state, os.environ)
    from fp8core.telemetry.sinks.wandb import WandbSink

    return WandbSink(Path(order["folder"]), order["settings"], order["spec"], state)


def _retrying(action: Any, ended: threading.Event) -> Any:
    """What ``action`` returns, in the end. How long it is tried after the end is the trainer's
    to say, by ending this process; where none does, what it raises is raised after two minutes."""
    pause, said = _FIRST_PAUSE, False
    give_up_at: float | None = None
    while True:
        try:
            done = action()
        except (SinkRefused, ImportError):
            raise
        except Exception as error:
            if ended.is_set():
                give_up_at = give_up_at or time.monotonic() + _LAST_SECONDS
                if time.monotonic() > give_up_at:
                    raise
            if not said:
                _say(problem=_words(error))
            said = True
            if ended.is_set():
                threading.Event().wait(min(pause, 1.0))
            else:
                ended.wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        else:
            if said:
                _say(recovered=True)
            return done


def _kept_from(path: Path, offset: int) -> int:
    """``offset``, or, where a node has let go what a sink had not read in time, that of the first
    whole record after it."""
    with path.open("rb") as file:
        try:
            begin = os.lseek(file.fileno(), offset, os.SEEK_DATA)
        except OSError:  # the end of the file
            return offset
        if begin <= offset:
            return offset
        file.seek(begin)
        return begin + len(file.readline())


def _read(path: Path, offset: int) -> tuple[list[dict[str, Any]], int, int]:
    """Whole records from ``offset`` on, about a mebibyte of them, the offset after them, and how
    many bytes among them are no records."""
    records = []
    damaged = 0
    with path.open("rb") as file:
        file.seek(offset)
        end = offset + _READ_BYTES
        for line in file:
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            if not line.startswith(b"\0"):  # the rest of a hole that began within a block
                record = decode_object(line)
                if record is not None and _is_record(record):
                    records.append(record)
                else:
                    damaged += len(line)
            if offset >= end:
                break
    return records, offset, damaged


def _is_record(record: dict[str, Any]) -> bool:
    """Whether a sink can take it: one that raises over a record would raise over it for ever."""
    moment = record.get("time")
    if not isinstance(moment, int | float) or not 0 <= moment < _LATEST:
        return False
    if record.get("type") == "event" and record.get("kind") == "resumed":
        data = record.get("data")
        return isinstance(data, dict) and _is_step(data.get("step"))
    if record.get("type") != "metrics":
        return isinstance(record.get("type"), str)
    values = record.get("values")
    return (
        _is_step(record.get("step"))
        and isinstance(values, dict)
        and all(map(_is_number, values.values()))
    )


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _is_number(value: Any) -> bool:
    try:
        decode_number(value)
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def _wait_for_end(outcome: list[str], ended: threading.Event) -> None:
    for line in sys.stdin:
        with contextlib.suppress(ValueError, KeyError):
            outcome.append(str(json.loads(line)["outcome"]))
    ended.set()


def _say(**message: Any) -> None:
    with contextlib.suppress(OSError):  # the trainer may be gone
        print(json.dumps(message), flush=True)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:2000]


def _read_state(path: Path) -> dict[str, Any]:
    return read_object(path) or {}


def _write_state(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state))
    partial.replace(path)
