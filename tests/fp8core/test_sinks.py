"""Sinks: what arrives at the other end, and that trouble there stays there."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fp8core.errors import SpecRefused
from fp8core.spec import JobSpec, Outcome, SpecInvalid, parse_spec
from fp8core.telemetry import TelemetryWriter, read_records
from fp8core.telemetry.sinks import Sinks, launch
from fp8core.telemetry.sinks.requirements import check_sinks, mlflow_server

SPEC: dict[str, Any] = {
    "name": "small",
    "model": {"source": "config", "config": {"model_type": "llama"}},
    "data": {"source": "builtin"},
    "recipe": {"engine": "amp"},
}


def spec_with(**sinks: Any) -> JobSpec:
    return parse_spec(SPEC | {"telemetry": sinks})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def events(workdir: Path, kind: str) -> list[dict[str, Any]]:
    found = [record for record, _ in read_records(workdir / "telemetry.jsonl")]
    return [record for record in found if record["type"] == "event" and record["kind"] == kind]


def artifacts(workdir: Path) -> list[tuple[str, str, int]]:
    found = [record for record, _ in read_records(workdir / "telemetry.jsonl")]
    return [(r["kind"], r["path"], r["step"]) for r in found if r["type"] == "artifact"]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run(spec: JobSpec, workdir: Path, steps: range, outcome: Outcome = Outcome.SUCCEEDED) -> None:
    """A run that records two figures a step, NaN at step 2, and FP8 health at even ones."""
    workdir.mkdir(exist_ok=True)
    with (
        TelemetryWriter(workdir / "telemetry.jsonl") as telemetry,
        Sinks(spec, workdir, telemetry) as sinks,
    ):
        if steps.start > 1:
            resumed = {"step": steps.start - 1}
            telemetry.event("resumed", "goes on from the checkpoint", resumed)
        for step in steps:
            loss = math.nan if step == 2 else 1.0 / step
            telemetry.record(step, {"train/loss": loss, "train/lr": 0.5})
            telemetry.progress(step, steps.stop, step, None)
            if step % 2 == 0:
                telemetry.record(step, {"fp8/layer.0/input/amax": float(step)}, health=True)
        sinks.outcome = outcome


def test_tensorboard_reads_back_what_was_recorded(tmp_path: Path) -> None:
    run(spec_with(tensorboard=True), tmp_path / "w", range(1, 6))
    found = EventAccumulator(str(tmp_path / "w" / "tensorboard")).Reload()
    assert sorted(found.Tags()["scalars"]) == ["fp8/layer.0/input/amax", "train/loss", "train/lr"]
    losses = found.Scalars("train/loss")
    assert [point.step for point in losses] == [1, 2, 3, 4, 5]
    assert losses[0].value == 1.0
    assert math.isnan(losses[1].value)
    assert losses[4].value == pytest.approx(0.2)
    assert [(p.step, p.value) for p in found.Scalars("fp8/layer.0/input/amax")] == [
        (2, 2.0),
        (4, 4.0),
    ]
    recorded = [r for r, _ in read_records(tmp_path / "w" / "telemetry.jsonl")]
    assert losses[0].wall_time == pytest.approx(recorded[0]["time"], abs=1e-3)
    assert artifacts(tmp_path / "w") == [("telemetry", "tensorboard", 5)]


def test_a_resumed_run_goes_on_and_hides_the_steps_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stop leaves a sink two seconds, and a busy machine takes as long to start one.
    monkeypatch.setitem(launch._PATIENCE_SECONDS, Outcome.STOPPED, 60.0)
    workdir, spec = tmp_path / "w", spec_with(tensorboard=True)
    run(spec, workdir, range(1, 8), Outcome.STOPPED)
    run(spec, workdir, range(4, 10))
    found = EventAccumulator(str(workdir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [point.step for point in found.Scalars("train/loss")] == list(range(1, 10))
    assert len(list((workdir / "tensorboard").iterdir())) == 2


def test_a_sink_that_is_switched_on_later_gets_all_of_it(tmp_path: Path) -> None:
    workdir = tmp_path / "w"
    run(spec_with(), workdir, range(1, 4))
    assert not (workdir / "sinks").exists()
    run(spec_with(tensorboard=True), workdir, range(4, 6))
    found = EventAccumulator(str(workdir / "tensorboard")).Reload()
    assert [point.step for point in found.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_training_from_the_command_line_writes_event_files(tmp_path: Path) -> None:
    from fp8core.commands.train import run_train

    model = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    spec = SPEC | {
        "model": {"source": "config", "config": model},
        "training": {"steps": 3, "batch_size": 2, "sequence_length": 32},
        "evaluation": {"fraction": 0.0},
        "checkpoint": {"final": False},
        "resources": {"device": "cpu"},
        "telemetry": {"tensorboard": True},
    }
    path, workdir = tmp_path / "spec.json", tmp_path / "w"
    path.write_text(json.dumps(spec))
    assert run_train(path, workdir, []) == 0
    found = EventAccumulator(str(workdir / "tensorboard")).Reload()
    assert [point.step for point in found.Scalars("train/loss")] == [1, 2, 3]
    assert ("telemetry", "tensorboard", 3) in artifacts(workdir)


def test_a_missing_package_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpecRefused, match=r"/telemetry/tensorboard: .*octrain\[tensorboard\]"):
        check_sinks(spec_with(tensorboard=True).telemetry)
    with pytest.raises(SpecRefused, match=r"/telemetry/wandb: .*octrain\[wandb\]"):
        check_sinks(spec_with(wandb={}).telemetry)
    check_sinks(spec_with().telemetry)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("file:///etc", "address of a server"),
        ("databricks", "address of a server"),
        ("https://", "address of a server"),
        ("http://host:99999", "address of a server"),
        ("http://host/?token=x", "address of a server"),
        ("https://ada:secret@mlflow.example.org", "no place for secrets"),
    ],
)
def test_a_tracking_uri_is_a_server_without_secrets(uri: str, words: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        spec_with(mlflow={"tracking_uri": uri})
    [problem] = caught.value.problems
    assert problem.pointer == "/telemetry/mlflow/tracking_uri"
    assert words in problem.message
    assert "secret@" not in problem.message


def test_the_machines_own_server_is_the_only_one_where_it_is_named() -> None:
    ours = {"MLFLOW_TRACKING_URI": "https://ada:pass@mlflow.example.org/"}
    assert mlflow_server("https://mlflow.example.org:443/x/", ours).endswith(":443/x")
    assert mlflow_server("http://other:5000", {}) == "http://other:5000"
    with pytest.raises(SpecRefused, match=r"to https://mlflow\.example\.org:443 only"):
        mlflow_server("https://elsewhere.example.org", ours)
    with pytest.raises(SpecRefused, match="no MLFLOW_TRACKING_URI"):
        mlflow_server(None, {})


class _Tracking(BaseHTTPRequestHandler):
    """The four calls of MLflow's REST API that the sink makes, and troubles on demand."""

    calls: list[tuple[str, dict[str, Any], str | None]]
    broken: bool

    def do_GET(self) -> None:
        self._answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.broken:
            self._answer(503, {})
            return
        path = self.path.removeprefix("/api/2.0/mlflow/")
        self.calls.append((path, body, self.headers["Authorization"]))
        self._answer(200, {"experiment_id": "7", "run": {"info": {"run_id": "r1"}}})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def tracking() -> Iterator[tuple[str, type[_Tracking]]]:
    """A server that can fail, and the handler that says what it got."""

    class Handler(_Tracking):
        calls: list[tuple[str, dict[str, Any], str | None]] = []  # noqa: RUF012
        broken = False

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_mlflow_gets_each_value_once_after_trouble_and_no_secret_of_another(
    tmp_path: Path, tracking: tuple[str, type[_Tracking]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, handler = tracking
    handler.broken = True
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hidden")
    workdir = tmp_path / "w"
    workdir.mkdir()
    spec = spec_with(mlflow={"tracking_uri": address, "experiment": "fp8"})
    with (
        TelemetryWriter(workdir / "telemetry.jsonl") as telemetry,
        Sinks(spec, workdir, telemetry) as sinks,
    ):
        telemetry.record(1, {"train/loss": math.nan, "train/lr": 0.5})
        wait_until(lambda: bool(events(workdir, "sink_delayed")))
        handler.broken = False
        wait_until(lambda: bool(events(workdir, "sink_recovered")))
        sinks.outcome = Outcome.STOPPED
    [delayed] = events(workdir, "sink_delayed")
    assert "HTTP 503" in delayed["message"]
    assert "training goes on" in delayed["message"]
    metrics = [m for _, body, _ in handler.calls for m in body.get("metrics", [])]
    assert [(m["key"], m["value"], m["step"]) for m in metrics] == [
        ("train/loss", "NaN", 1),
        ("train/lr", 0.5, 1),
    ]
    assert handler.calls[-1][1]["status"] == "KILLED"
    assert {authorization for _, _, authorization in handler.calls} == {None}


def test_mlflow_of_the_machine_gets_the_machines_token(
    tmp_path: Path, tracking: tuple[str, type[_Tracking]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, handler = tracking
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hidden")
    run(spec_with(mlflow={}), tmp_path / "w", range(1, 3))
    assert {authorization for _, _, authorization in handler.calls} == {"Bearer hidden"}
    assert "hidden" not in (tmp_path / "w" / "telemetry.jsonl").read_text()
    run(spec_with(mlflow={}), tmp_path / "w", range(3, 5))
    assert [path for path, _, _ in handler.calls].count("runs/create") == 1, "it goes on"
    steps = [m["step"] for _, b, _ in handler.calls for m in b.get("metrics", [])]
    assert steps == [1, 1, 2, 2, 2, 3, 3, 4, 4, 4]


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


MLFLOW = os.environ.get("OCTRAIN_TEST_MLFLOW")


@pytest.mark.skipif(not MLFLOW, reason="OCTRAIN_TEST_MLFLOW names no Python that has MLflow")
def test_a_real_mlflow_server_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MLFLOW is not None
    for outcome in (Outcome.STOPPED, Outcome.SUCCEEDED):
        monkeypatch.setitem(launch._PATIENCE_SECONDS, outcome, 60.0)
    port = free_port()
    command = [MLFLOW, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    with (tmp_path / "mlflow.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:

        def up() -> bool:
            assert server.poll() is None, (tmp_path / "mlflow.log").read_text()
            try:
                return httpx.get(f"{address}/health").is_success
            except httpx.HTTPError:
                return False

        wait_until(up)
        spec = spec_with(mlflow={"tracking_uri": address, "experiment": "fp8"})
        run(spec, tmp_path / "w", range(1, 700), Outcome.STOPPED)
        run(spec, tmp_path / "w", range(700, 1200))
        assert events(tmp_path / "w", "sink_failed") == []
        api = httpx.Client(base_url=f"{address}/api/2.0/mlflow/", timeout=30)
        found = api.get("experiments/get-by-name", params={"experiment_name": "fp8"}).json()
        body = {"experiment_ids": [found["experiment"]["experiment_id"]]}
        [one] = api.post("runs/search", json=body).json()["runs"]
        assert one["info"]["status"] == "FINISHED"
        assert one["info"]["run_name"] == "small"
        parameters = {item["key"]: item["value"] for item in one["data"]["params"]}
        assert parameters["training.optimizer.lr"] == "0.0003"
        query = {"run_id": one["info"]["run_id"], "metric_key": "train/loss"}
        points = api.get("metrics/get-history", params=query).json()["metrics"]
        assert [point["step"] for point in points] == list(range(1, 1200))
        assert points[1]["value"] == "NaN" or math.isnan(points[1]["value"])
        assert points[99]["value"] == pytest.approx(0.01)
    finally:
        server.terminate()
        server.wait()


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format after a header of seven bytes."""
    data, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # what is too short for a header ends the block
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or last
            yield record
            record = b""


def test_wandb_offline_writes_a_run_that_reads_back(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    workdir = tmp_path / "w"
    run(spec_with(wandb={"project": "fp8"}), workdir, range(1, 5))
    assert events(workdir, "sink_failed") == []
    [(kind, path, _)] = artifacts(workdir)
    assert kind == "telemetry"
    assert not [file for file in (workdir / path).rglob("*") if file.is_symlink()]
    [file] = (workdir / path).glob("*.wandb")
    rows, project = [], ""
    for data in wandb_records(file):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            project = record.run.project
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({".".join([*i.nested_key] or [i.key]): i.value_json for i in items})
    assert project == "fp8"
    losses = {int(row["step"]): row["train/loss"] for row in rows if "train/loss" in row}
    assert sorted(losses) == [1, 2, 3, 4]
    assert float(losses[4]) == 0.25
