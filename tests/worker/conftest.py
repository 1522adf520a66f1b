"""A real HTTP server that speaks the worker's side of the API strictly, and real processes.

The server keeps the same rules as the product's API (fencing tokens, one claim, numbered telemetry
without gaps) and can besides be made to fail in ways that a healthy one cannot: be away, lose its
answers, grant leases of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from octrain_api.attempts.body import CONTENT_TYPE, parse
from octrain_api.settings import HttpSettings
from octrain_worker.attempt_folder import AttemptFolder
from octrain_worker.supervisor.environment import MARKER
from octrain_worker.supervisor.process_tree import send_signal, with_environment

TRAINER = Path(__file__).with_name("trainer_program.py")
REPOSITORY = Path(__file__).parents[2]


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """The first true value of ``condition``; fails with ``what`` when there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


@dataclass
class Attempt:
    """One attempt as the server sees it."""

    id: str
    spec: dict[str, Any]
    wanted: str = "run"
    wanted_reason: str | None = None
    stop_by: float | None = None  # on the monotonic clock
    lease_seconds: float = 30.0
    supervisor: str | None = None
    token: int | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    finished: dict[str, Any] | None = None
    heartbeats: int = 0
    # The number of the last lease granted, and those that heartbeats said were held.
    lease_number: int = 0
    held: list[int | None] = field(default_factory=list)
    resume_candidates: list[dict[str, Any]] = field(default_factory=list)
    claims: int = 0
    roots: list[str] | None = None
    gpu_indices: list[int] = field(default_factory=list)
    traceparent: str | None = None

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["type"] == kind]

    @property
    def wish(self) -> dict[str, Any]:
        left = None if self.stop_by is None else max(self.stop_by - time.monotonic(), 0.0)
        return {
            "wanted": self.wanted,
            "wanted_reason": self.wanted_reason,
            "stop_within_seconds": left,
        }

    def lease(self) -> dict[str, Any]:
        """The next lease."""
        self.lease_number += 1
        return {"lease_seconds": self.lease_seconds, "lease_number": self.lease_number}

    @property
    def steps(self) -> list[int]:
        return [
            record["step"]
            for record in self.of_type("metrics")
            if not all(name.startswith(("gpu/", "host/")) for name in record["values"])
        ]

    @property
    def events(self) -> list[str]:
        return [record["kind"] for record in self.of_type("event")]

    def candidate(self, name: str) -> dict[str, Any]:
        """A registered checkpoint as the claim of a later attempt offers it."""
        stored = self.artifacts["checkpoint", name]
        return {
            "artifact_id": f"art_checkpoint_{name}",
            "step": stored["step"],
            "url": stored["url"],
            "manifest": {"complete": True, "files": stored["files"]},
        }

    def data_of(self, kind: str) -> list[dict[str, Any]]:
        return [event["data"] for event in self.of_type("event") if event["kind"] == kind]

    @property
    def log(self) -> list[str]:
        return [record["text"] for record in self.of_type("log")]


class ApiServer:
    """The server. ``away`` refuses everything with 503; ``lose_answers`` acts and then says 502."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.attempts: dict[str, Attempt] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.active: list[str] = []
        self.samples: list[dict[str, Any]] = []
        # What node heartbeats are answered with: run or drain, unclaimed attempts, files to remove.
        self.node_wanted = "run"
        self.placed: list[str] = []
        self.leftovers: dict[str, dict[str, Any]] = {}
        self.away = False
        self.lose_answers = 0
        self.not_found = {"type": "/problems/not-found", "detail": "There is no such attempt."}
        self.unknown_reasons: set[str] = set()
        self.heartbeat_interval = 0.2
        self.refuse_records: Callable[[dict[str, Any]], bool] = lambda record: False
        self.requests: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                body = read_body(data, self.headers["Content-Type"])
                with owner.lock:
                    status, answer = owner.handle(self.path, body, self.headers)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, attempt_id: str, script: dict[str, Any], **options: Any) -> Attempt:
        limits = options.pop("limits", {"cancel_deadline_seconds": 1})
        attempt = Attempt(attempt_id, {"script": script, "limits": limits}, **options)
        self.attempts[attempt_id] = attempt
        return attempt

    def handle(self, path: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        self.requests.append(path)
        if self.away:
            return 503, {"detail": "away"}
        if headers["Authorization"] != "Bearer node-key":
            return 401, {"detail": "no such key"}
        status, answer = self._route(path.removeprefix("/v1").strip("/").split("/"), body)
        if self.lose_answers and status == 200:
            self.lose_answers -= 1
            return 502, {"detail": "the answer is lost"}
        return status, answer

    def _route(self, parts: list[str], body: dict[str, Any]) -> tuple[int, Any]:
        if parts == ["nodes", "register"]:
            self.nodes["node_1"] = body
            interval = 0.2
            return 200, {
                "node_id": "node_1",
                "queue": "node.node_1",
                "heartbeat_interval_seconds": interval,
            }
        if parts[0] == "nodes" and parts[2] == "metrics":
            self.samples.extend(body["samples"])
            return 200, {"stored": len(body["samples"])}
        if parts[0] == "nodes":
            return 200, self._node_heartbeat(body)
        attempt = self.attempts.get(parts[1])
        if attempt is None:
            return 404, self.not_found
        if parts[2] == "claim":
            return self._claim(attempt, body)
        same = parts[2] == "finish" and attempt.finished == _without_token(body)
        if body["fencing_token"] != attempt.token or (attempt.finished and not same):
            return 409, {"type": "/problems/stale-attempt", "detail": "stale"}
        return getattr(self, f"_{parts[2]}")(attempt, body)

    def _node_heartbeat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.active = body["active_attempts"]
        for gone in body["removed"]:
            self.leftovers.pop(gone, None)
        unclaimed = [one for one in self.placed if self.attempts[one].supervisor is None]
        return {
            "wanted": self.node_wanted,
            "placed": [{"attempt_id": one, "job_id": "job_1", "attempt": 1} for one in unclaimed],
            "leftovers": list(self.leftovers.values()),
        }

    def _claim(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        if attempt.finished or attempt.supervisor not in (None, body["supervisor"]):
            return 409, {"type": "/problems/stale-attempt", "detail": "claimed or ended"}
        attempt.supervisor = body["supervisor"]
        attempt.token = attempt.token or 7
        attempt.claims += 1
        return 200, {
            "attempt_id": attempt.id,
            "job_id": "job_1",
            "attempt": 1,
            "fencing_token": attempt.token,
            "spec": attempt.spec,
            **attempt.wish,
            **attempt.lease(),
            "heartbeat_interval_seconds": self.heartbeat_interval,
            "artifact_prefix": f"jobs/job_1/attempts/{attempt.id}",
            "resume_candidates": attempt.resume_candidates,
            "device": "cuda" if attempt.gpu_indices else "cpu",
            "gpu_indices": attempt.gpu_indices,
            "roots": attempt.roots,
            "traceparent": attempt.traceparent,
        }

    def _heartbeat(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        attempt.heartbeats += 1
        attempt.held.append(body["lease_number"])
        return 200, {**attempt.wish, **attempt.lease()}

    def _telemetry(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        expected = len(attempt.records) + 1
        if body["first_seq"] > expected:
            return 409, {"type": "/problems/sequence-gap", "expected_seq": expected}
        if any(self.refuse_records(record) for record in body["records"]):
            return 422, {"detail": "a record is not valid"}
        attempt.records += body["records"][expected - body["first_seq"] :]
        return 200, {**attempt.wish, "acknowledged_seq": len(attempt.records)}

    def _artifacts(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        attempt.artifacts.setdefault((body["kind"], body["name"]), body)
        return 200, {"artifact_id": f"art_{body['kind']}_{body['name']}"}

    def _finish(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        if body["reason"] in self.unknown_reasons:
            return 422, {"detail": f"/reason: {body['reason']} is none"}
        attempt.finished = _without_token(body)
        return 200, {"job_status": attempt.finished["outcome"]}


def read_body(data: bytes, content_type: str) -> Any:
    """The JSON of a body; a packed one is unpacked by the product's own API."""
    if content_type != CONTENT_TYPE:
        return json.loads(data)
    batch = parse(data, HttpSettings())
    records = dict(batch.records)
    for frame in batch.frames:
        block = frame.block
        for row, offset in enumerate(frame.offsets):
            records[offset] = {
                "type": "metrics",
                "step": int(block.rows.steps[row]),
                "values": {
                    name: float(block.values[column, row])
                    for column, name in enumerate(block.names)
                    if block.present is None or block.present[column, row]
                },
            }
    return {
        "fencing_token": batch.fencing_token,
        "first_seq": batch.first_seq,
        "records": [records[offset] for offset in range(batch.count)],
    }


def _without_token(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "fencing_token"}


@dataclass
class Workplace:
    """A node's data folder, a server, and the processes that a test starts with them."""

    api: ApiServer
    data: Path
    environment: dict[str, str]
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def folder(self, attempt_id: str) -> AttemptFolder:
        return AttemptFolder(self.data / "attempts" / attempt_id)

    def run(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        log = (self.data / "test.log").open("ab")
        child = subprocess.Popen(
            [sys.executable, "-m", "octrain_worker", *arguments],
            env=self.environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, **options},
        )
        self.children.append(child)
        return child

    def supervise(self, attempt_id: str, *, within: Path | None = None) -> subprocess.Popen[bytes]:
        """Starts a supervisor of this attempt, ``within`` a cgroup where one is named."""
        options: dict[str, Any] = {}
        if within is not None:
            join = within / "cgroup.procs"
            options["preexec_fn"] = lambda: join.write_text(str(os.getpid()))
        arguments = ("--node-id", "node_1", "--attempt", attempt_id, "--job", "job_1")
        return self.run("supervise", *arguments, **options)

    def log(self) -> str:
        return (self.data / "test.log").read_text()

    def trainer_processes(self, attempt_id: str) -> list[int]:
        record = self.folder(attempt_id).read_record()
        if record is None:
            return []
        return [process.pid for process in with_environment(MARKER, record.marker)]

    def clean_up(self) -> None:
        """Ends what a failed test left over."""
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()
        for path in (self.data / "attempts").glob("*"):
            record = AttemptFolder(path).read_record()
            if record is None:
                continue
            if record.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)
            for process in with_environment(MARKER, record.marker):
                send_signal(process, signal.SIGKILL)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


@pytest.fixture
def workplace(api: ApiServer, tmp_path: Path) -> Iterator[Workplace]:
    data = tmp_path / "node"
    data.mkdir()
    python_path = os.pathsep.join(
        [str(REPOSITORY), str(REPOSITORY / "worker"), os.environ.get("PYTHONPATH", "")]
    )
    environment = {
        **os.environ,
        "PYTHONPATH": python_path,
        "OCTRAIN_API_URL": api.url,
        "OCTRAIN_NODE_KEY": "node-key",
        "OCTRAIN_WORKER_DATA_DIR": str(data),
        "OCTRAIN_ARTIFACT_URL": (tmp_path / "store").as_uri(),
        "OCTRAIN_TRAINER_COMMAND": f"{sys.executable} {TRAINER}",
        "OCTRAIN_SUPERVISOR_LEFTOVER_GRACE_SECONDS": "0.2",
        "DATABASE_URL": "postgresql://secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "OMP_NUM_THREADS": "1",
    }
    place = Workplace(api, data, environment)
    yield place
    place.clean_up()


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_until
