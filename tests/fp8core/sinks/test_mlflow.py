"""MLflow: which server, what it gets after trouble, and that a real one has all of it."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8core.errors import SpecRefused
from fp8core.spec import Outcome, SpecInvalid
from fp8core.telemetry import TelemetryWriter
from fp8core.telemetry.sinks import Sinks, launch
from fp8core.telemetry.sinks.requirements import mlflow_server
from tests.fp8core.sinks.runs import events, run, spec_with, wait_until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
