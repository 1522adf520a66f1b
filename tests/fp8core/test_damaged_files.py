"""The files that the trainer and its sinks read back, damaged: each is read, or passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8core.telemetry import read_records
from fp8core.telemetry.record_file import RecordFile, encode_record
from fp8core.telemetry.sinks.process import _read, _read_state
from fp8core.telemetry.sinks.tensorboard import TensorBoardSink
from fp8core.training.parity import _stored
from fp8core.training.ranks.launcher import _failures, _last_step
from fp8core.training.ranks.place import RankPlace
from tests.damage import read_each_damaged

RECORDS: list[dict[str, Any]] = [
    {"seq": 1, "time": 1.5e9, "type": "phase", "phase": "training"},
    *(
        {"seq": n, "time": 1.5e9, "type": "metrics", "step": n, "values": {"a": 1.5, "b": "NaN"}}
        for n in range(2, 9)
    ),
    {"seq": 9, "time": 1.5e9, "type": "event", "kind": "resumed", "data": {"step": 4}},
    {"seq": 10, "time": 1.5e9, "type": "progress", "step": 8, "tokens": 80},
]


@pytest.fixture
def each() -> Callable[..., None]:
    return read_each_damaged


def test_the_telemetry_file_is_taken_up_again(tmp_path: Path, each: Any) -> None:
    file = tmp_path / "telemetry.jsonl"

    def go_on() -> None:
        _last_step(tmp_path)
        again = RecordFile(file)
        number = again.last_seq
        again.append(encode_record({"type": "event", "kind": "new"}))
        again.close()
        assert [record for record, _ in read_records(file)][-1]["seq"] == number + 1

    each(file, RECORDS, go_on)


def test_a_sink_passes_over_what_it_could_never_send(tmp_path: Path, each: Any) -> None:
    file = tmp_path / "telemetry.jsonl"
    sink = TensorBoardSink(tmp_path / "events")

    def send() -> None:
        offset, told = 0, 0
        while True:
            records, after, lost = _read(file, offset)
            sink.write(records)
            told += lost
            if after == offset:
                break
            offset = after
        rest = file.read_bytes()[offset:]
        # All that is not sent is told, or waits for the end of its line.
        assert b"\n" not in rest

    each(file, RECORDS, send)
    sink.close("succeeded")
    file.write_text('{"type":"metrics","step":1,"time":1.0,"values":{"a":[]}}\n')
    assert _read(file, 0) == ([], file.stat().st_size, file.stat().st_size)


def test_a_sinks_state_and_the_ends_of_ranks(tmp_path: Path, each: Any) -> None:
    state = tmp_path / "wandb.json"
    each(state, {"run": "r", "offset": 9}, lambda: _read_state(state).items() and None)
    place = RankPlace(0, 1, tmp_path)
    end = {"result": {"outcome": "failed"}, "time": 1.5, "secondary": False}

    def read() -> None:
        found = place.read_end()
        assert found is None or isinstance(found.result, dict)

    each(tmp_path / "end-0", end, read)
    failures = tmp_path / "failures.json"
    each(
        failures, [[{"rank": 0, "exit_code": 1, "time": 1.5}]], lambda: _failures(tmp_path) and None
    )


def test_the_losses_of_a_reference(tmp_path: Path, each: Any) -> None:
    workdir: Any = SimpleNamespace(parity=tmp_path / "parity.json")

    def read() -> None:
        found = _stored(workdir, "f")
        assert found is None or all(isinstance(loss, float) for loss in found)

    each(workdir.parity, {"fingerprint": "f", "losses": [1.5, 1.25]}, read)
    workdir.parity.write_text(json.dumps({"fingerprint": "f", "losses": [1.5, 1.25]}))
    assert _stored(workdir, "f") == [1.5, 1.25]
