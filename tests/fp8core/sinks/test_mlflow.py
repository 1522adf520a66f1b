"""MLflow: which server, and what it gets after trouble; a real one is in test_mlflow_server.py."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fp8core.errors import SpecRefused
from fp8core.spec import Outcome, SpecInvalid
from fp8core.telemetry import TelemetryWriter
from fp8core.telemetry.sinks import Sinks
from fp8core.telemetry.sinks.requirements import mlflow_server
from tests.fp8core.sinks.runs import events, run, spec_with, wait_until


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
