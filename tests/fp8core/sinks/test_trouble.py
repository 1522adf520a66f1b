"""Sinks that are missing, silent, slow or dead: the training goes on, and is told."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8core.errors import SpecRefused
from fp8core.spec import Outcome
from fp8core.telemetry import TelemetryWriter, read_records
from fp8core.telemetry.sinks import Sinks, launch, process
from fp8core.telemetry.sinks.requirements import check_sinks
from tests.fp8core.sinks.runs import artifacts, events, run, spec_with, wait_until


def test_a_missing_package_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpecRefused, match=r"/telemetry/tensorboard: .*octrain\[tensorboard\]"):
        check_sinks(spec_with(tensorboard=True).telemetry)
    with pytest.raises(SpecRefused, match=r"/telemetry/wandb: .*octrain\[wandb\]"):
        check_sinks(spec_with(wandb={}).telemetry)
    check_sinks(spec_with().telemetry)


def test_a_sink_that_hangs_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(launch._PATIENCE_SECONDS, Outcome.SUCCEEDED, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        run(spec_with(mlflow={"tracking_uri": address}), tmp_path / "w", range(1, 100))
        assert time.monotonic() - started < 60
    [failed] = events(tmp_path / "w", "sink_failed")
    assert failed["data"]["sink"] == "mlflow"
    kept = [r for r, _ in read_records(tmp_path / "w" / "telemetry.jsonl")]
    assert [r["step"] for r in kept if r["type"] == "progress"] == list(range(1, 100))


def test_a_sink_that_is_silent_while_training_goes_on_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(launch, "_LOOK_SECONDS", 0.1)
    monkeypatch.setitem(launch._PATIENCE_SECONDS, Outcome.FAILED, 0.1)
    workdir = tmp_path / "w"
    workdir.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        spec = spec_with(mlflow={"tracking_uri": address})
        with (
            TelemetryWriter(workdir / "telemetry.jsonl") as telemetry,
            Sinks(spec, workdir, telemetry),
        ):
            telemetry.record(1, {"train/loss": 1.0})
            wait_until(lambda: bool(events(workdir, "sink_delayed")))
    assert len(events(workdir, "sink_delayed")) == 1
    assert len(events(workdir, "sink_failed")) == 1


def test_a_sink_that_dies_is_told_at_once(tmp_path: Path) -> None:
    workdir = tmp_path / "w"
    workdir.mkdir()
    # A folder's place is taken, so TensorBoard's writer cannot begin.
    (workdir / "tensorboard").write_text("")
    with (
        TelemetryWriter(workdir / "telemetry.jsonl") as telemetry,
        Sinks(spec_with(tensorboard=True), workdir, telemetry) as sinks,
    ):
        (process,) = sinks._processes
        process._process.kill()
        wait_until(lambda: bool(events(workdir, "sink_failed")))
        telemetry.record(1, {"train/loss": 1.0})
    assert len(events(workdir, "sink_failed")) == 1
    assert artifacts(workdir) == []


def test_a_sink_whose_records_were_let_go_tells_it_and_goes_on(tmp_path: Path) -> None:
    """A hole in the file, as a node makes one where a sink is very far behind."""
    workdir = tmp_path / "w"
    workdir.mkdir()
    path = workdir / "telemetry.jsonl"
    line = json.dumps({"seq": 1, "time": 1.0, "type": "phase", "phase": "x" * 500}) + "\n"
    hole = 1 << 20
    with path.open("wb") as file:
        file.truncate(hole)
        file.seek(hole)
        file.write(b'the rest of a record"}\n' + line.encode())
        file.flush()
        kept = os.lseek(file.fileno(), 0, os.SEEK_DATA)
    assert kept == hole, "this file system makes no holes"
    run(spec_with(tensorboard=True), workdir, range(1, 4))
    recorded = [json.loads(one) for one in path.read_bytes()[hole:].splitlines()[1:]]
    [lost] = [one for one in recorded if one.get("kind") == "sink_lost"]
    assert f"{hole + 23} bytes of records were let go" in lost["message"]
    assert not [one for one in recorded if one.get("kind") == "sink_failed"]
    assert any((workdir / "tensorboard").iterdir())


def test_a_sink_whose_trainer_is_gone_does_not_try_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, now, tries = threading.Event(), 0.0, 0
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(process, "_FIRST_PAUSE", 0.01)

    def send() -> None:
        nonlocal now, tries
        tries += 1
        now += 50.0
        if tries == 3:  # until then nobody had said that the end has come
            ended.set()
        raise ConnectionError("the server is away")

    with pytest.raises(ConnectionError):
        process._retrying(send, ended)
    assert tries == 6, "for two minutes from the end on"
