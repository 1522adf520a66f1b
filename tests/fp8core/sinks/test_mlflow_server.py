"""A real MLflow tracking server, with accounts, has all that was recorded."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8core.spec import Outcome
from fp8core.telemetry import TelemetryWriter
from fp8core.telemetry.sinks import Sinks, launch
from tests.fp8core.sinks.runs import events, run, spec_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PACKAGES = Path(sys.prefix) / "mlflow-server"
USER, PASSWORD = "ada", "correct-horse-battery"
# The greatest float64, which MLflow's database holds in the place of an infinity.
MOST = sys.float_info.max
ODD = {
    "odd/nan": math.nan,
    "odd/infinity": math.inf,
    "odd/minus_infinity": -math.inf,
    "odd/least": 5e-324,
    "odd/third": 1 / 3,
    "odd/count": 2**53,
    "odd/zero": 0.0,
}


class MlflowServer:
    """MLflow's own server on a database of its own, which lets in nobody but ``USER``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"
        self.api = httpx.Client(
            base_url=f"{self.address}/api/2.0/mlflow/", auth=(USER, PASSWORD), timeout=60
        )
        (folder / "accounts.ini").write_text(
            "[mlflow]\n"
            "default_permission = READ\n"
            f"database_uri = sqlite:///{folder}/accounts.db\n"
            f"admin_username = {USER}\n"
            f"admin_password = {PASSWORD}\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
            "grant_default_workspace_access = false\n"
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        kept = ("PATH", "HOME", "LANG", "TMPDIR")
        environment = {name: os.environ[name] for name in kept if name in os.environ} | {
            "PYTHONPATH": str(PACKAGES),
            "MLFLOW_AUTH_CONFIG_PATH": str(self.folder / "accounts.ini"),
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "of these tests",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        until(self._answers)

    def kill(self) -> None:
        """All of it, as a machine dies."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        found = self.api.get("experiments/get-by-name", params={"experiment_name": experiment})
        if found.status_code == 404:
            return []
        body = {"experiment_ids": [found.json()["experiment"]["experiment_id"]]}
        return list(self.api.post("runs/search", json=body).json().get("runs", []))

    def history(self, run: dict[str, Any], metric: str) -> list[tuple[int, float]]:
        """Step and value of each point of a metric, in the order of their steps."""
        query = {"run_id": run["info"]["run_id"], "metric_key": metric, "max_results": 25000}
        points = self.api.get("metrics/get-history", params=query).json().get("metrics", [])
        return sorted((int(point["step"]), float(point["value"])) for point in points)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        try:
            return httpx.get(f"{self.address}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False


def until(condition: Callable[[], Any]) -> None:
    """A server of MLflow's takes half a minute to start on a machine that does other things too."""
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    if not PACKAGES.is_dir():
        reason = "no MLflow here: `make mlflow-server` installs one"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    made = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    try:
        made.start()
        yield made
    finally:
        made.kill()


@pytest.fixture
def server(shared: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    """Running, and named to this machine with a user's name and password."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared.address)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN", raising=False)
    if shared.process is None:
        shared.start()
    return shared


def test_every_step_parameter_and_end_of_two_attempts_in_a_workdir(
    tmp_path: Path, server: MlflowServer
) -> None:
    workdir, spec = tmp_path / "w", spec_with(mlflow={"experiment": "attempts"})
    run(spec, workdir, range(1, 700), Outcome.STOPPED)
    [one] = server.runs("attempts")
    assert one["info"]["status"] == "KILLED"
    # The second repeats from its checkpoint on.
    run(spec, workdir, range(650, 1200))
    [one] = server.runs("attempts")
    assert events(workdir, "sink_failed") == []
    assert one["info"]["status"] == "FINISHED"
    assert int(one["info"]["end_time"]) >= int(one["info"]["start_time"])
    assert one["info"]["run_name"] == "small"
    tags = {item["key"]: item["value"] for item in one["data"]["tags"]}
    assert tags["mlflow.source.name"] == "octrain"
    parameters = {item["key"]: item["value"] for item in one["data"]["params"]}
    assert parameters["training.optimizer.lr"] == "0.0003"
    assert parameters["recipe.engine"] == "amp"
    assert parameters["telemetry.mlflow.experiment"] == "attempts"
    assert PASSWORD not in str(one)

    losses = server.history(one, "train/loss")
    repeated = sorted([*range(1, 700), *range(650, 1200)])
    assert [step for step, _ in losses] == repeated
    assert math.isnan(losses[1][1])
    assert all(value == 1.0 / step for step, value in losses if step != 2)
    amaxes = server.history(one, "fp8/layer.0/input/amax")
    assert amaxes == [(step, float(step)) for step in repeated if step % 2 == 0]


def test_odd_numbers_arrive_as_near_as_mlflow_holds_them(
    tmp_path: Path, server: MlflowServer
) -> None:
    spec = spec_with(mlflow={"tracking_uri": server.address, "experiment": "odd"})
    with (
        TelemetryWriter(tmp_path / "telemetry.jsonl") as telemetry,
        Sinks(spec, tmp_path, telemetry),
    ):
        telemetry.record(7, ODD)
    [one] = server.runs("odd")
    assert one["info"]["status"] == "FAILED", "nobody said that the training went well"
    found = {name: server.history(one, name) for name in ODD}
    [(step, nan)] = found.pop("odd/nan")
    assert step == 7
    assert math.isnan(nan)
    held = ODD | {"odd/infinity": MOST, "odd/minus_infinity": -MOST}
    assert found == {name: [(7, held[name])] for name in found}


def test_a_password_that_is_refused_is_told_and_shown_to_nobody(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "of-yesterday")
    run(spec_with(mlflow={"experiment": "refused"}), tmp_path / "w", range(1, 50))
    [failed] = events(tmp_path / "w", "sink_failed")
    assert "HTTP 401" in failed["message"]
    assert "training goes on" in failed["message"]
    for path in (tmp_path / "w").rglob("*"):
        assert path.is_dir() or b"of-yesterday" not in path.read_bytes()
    assert server.runs("refused") == []


def test_a_server_that_dies_and_comes_back_has_each_step_once(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir, spec = tmp_path / "w", spec_with(mlflow={"experiment": "away"})
    workdir.mkdir()
    with (
        TelemetryWriter(workdir / "telemetry.jsonl") as telemetry,
        Sinks(spec, workdir, telemetry) as sinks,
    ):

        def train(steps: range) -> None:
            for step in steps:
                telemetry.record(step, {"train/loss": 1.0 / step})
                telemetry.progress(step, 4000, step, None)

        train(range(1, 101))
        until(lambda: any(server.history(one, "train/loss") for one in server.runs("away")))
        server.kill()
        began = time.monotonic()
        train(range(101, 2001))
        assert time.monotonic() - began < 20, "the training does not wait for the server"
        until(lambda: events(workdir, "sink_delayed"))
        server.start()
        until(lambda: events(workdir, "sink_recovered"))
        train(range(2001, 2101))
        sinks.outcome = Outcome.STOPPED
    assert events(workdir, "sink_failed") == []

    # Away to the end of a training, which waits as long as it says and tells what was not sent.
    server.kill()
    monkeypatch.setitem(launch._PATIENCE_SECONDS, Outcome.STOPPED, 2.0)
    run(spec, workdir, range(2101, 2201), Outcome.STOPPED)
    [failed] = events(workdir, "sink_failed")
    assert "telemetry.jsonl keeps what is unsent" in failed["message"]
    server.start()
    run(spec, workdir, range(2201, 2301))
    [one] = server.runs("away")
    assert one["info"]["status"] == "FINISHED"
    assert server.history(one, "train/loss") == [(step, 1.0 / step) for step in range(1, 2301)]
