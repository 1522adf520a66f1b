"""A small scripted HTTP server (the client's side of the wire, byte for byte), and the real one."""

from __future__ import annotations

import copy
import io
import json
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import octrain
from octrain_api.jobs.schemas import EXAMPLE_SPEC
from octrain_api.migrate import migrate
from octrain_api.settings import (
    BrokerSettings,
    DatabaseSettings,
    HttpSettings,
    Settings,
    StorageSettings,
)
from tests.octrain.service import LiveServer, Node


@dataclass
class Request:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """An answer; ``cut`` breaks the connection after so many bytes of the body."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    cut: int | None = None

    def encoded(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return b"" if self.body is None else json.dumps(self.body).encode()


Route = Callable[[Request], Reply]


class ScriptedServer:
    """``routes`` maps "GET /v1/jobs" to what answers it; ``requests`` is what came."""

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}
        self.requests: list[Request] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                parts = urlsplit(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                request = Request(
                    self.command,
                    parts.path,
                    {key: values[0] for key, values in parse_qs(parts.query).items()},
                    {key.lower(): value for key, value in self.headers.items()},
                    json.loads(raw) if raw else None,
                )
                outer.requests.append(request)
                route = outer.routes.get(f"{self.command} {parts.path}")
                missing = {"title": "Not found", "status": 404, "detail": "There is no such job."}
                reply = route(request) if route else Reply(missing, 404)
                content = reply.encoded()
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.content_type)
                self.send_header("Content-Length", str(len(content)))
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content if reply.cut is None else content[: reply.cut])
                if reply.cut is not None:
                    self.close_connection = True

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    made.close()


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[octrain.Client]:
    """A client of the scripted server."""
    with octrain.Client(server.url, "oct_secret") as made:
        yield made


@pytest.fixture(autouse=True)
def _no_inherited_server(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """No test reads the settings or the local stack of the person who runs it."""
    for name in ("OCTRAIN_API_URL", "OCTRAIN_API_KEY", "DATABASE_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OCTRAIN_DATA_DIR", str(tmp_path_factory.mktemp("no-stack")))


@pytest.fixture
def reply() -> type[Reply]:
    return Reply


@pytest.fixture
def job_object() -> Callable[..., dict[str, Any]]:
    """A job as the server tells it, with some fields changed."""

    def build(**changes: Any) -> dict[str, Any]:
        return {
            "id": "job_1",
            "name": "first",
            "status": "running",
            "is_final": False,
            "progress": {"step": 3, "total_steps": 10, "tokens": 96, "eta_seconds": 7.0},
            "latest_metrics": {"train/loss": 2.5},
            "attempts": [],
            "version": 1,
            "spec": {"recipe": {"engine": "amp", "dtype": "bf16"}},
            **changes,
        }

    return build


@dataclass
class Ended:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        assert self.stdout, self.stderr
        return json.loads(self.stdout)


Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`octrain` in this process, with the exit status that a shell would see."""
    from octrain.cli import main

    def run(*arguments: str, url: str = "", key: str = "k", stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["octrain", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("OCTRAIN_API_KEY", key)
        if url:
            monkeypatch.setenv("OCTRAIN_API_URL", url)
        capsys.readouterr()
        try:
            main()
            status: Any = 0
        except SystemExit as ended:
            status = ended.code or 0
        output = capsys.readouterr()
        return Ended(int(status), output.out, output.err)

    return run


@pytest.fixture(scope="session")
def live(
    postgres_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """The real application at a real socket, over a database with the schema."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "shared").mkdir()
    settings = Settings(
        database=DatabaseSettings(url=postgres_url, pool_size=5),
        broker=BrokerSettings(url=redis_url),
        storage=StorageSettings(
            artifact_url=(folder / "artifacts").as_uri(), roots_text=str(folder / "shared")
        ),
        http=HttpSettings(stream_keep_alive=0.5, stream_poll=0.2),
    )
    migrate(settings.database)
    server = LiveServer(settings)
    yield server
    server.close()


@pytest.fixture(scope="session")
def node(live: LiveServer) -> Iterator[Node]:
    """A node of the live server that does what tests tell it."""
    made = Node(live, "node-a")
    yield made
    made.close()


@pytest.fixture
def owner_key(live: LiveServer) -> str:
    """A key of an owner whom only this test has."""
    return live.key(f"owner-{uuid.uuid4().hex[:8]}", "jobs:read", "jobs:write")


@pytest.fixture
def spec() -> dict[str, Any]:
    """A small spec that any CPU node can run."""
    return copy.deepcopy(EXAMPLE_SPEC)
