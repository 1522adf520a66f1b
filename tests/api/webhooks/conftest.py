"""Receivers on the loopback, and the delivery loop turned by hand."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octrain_api.controller.webhooks import Deliveries
from octrain_api.settings import WebhookSettings
from octrain_api.webhooks.sender import Sender

LOOPBACK = "127.0.0.0/8"


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: str

    @property
    def message_id(self) -> str:
        return self.headers["webhook-id"]


@dataclass
class Receiver:
    """A server that answers as `answer` says: (status, headers, body), or by itself."""

    requests: list[Received] = field(default_factory=list)
    answer: Callable[[Received, BaseHTTPRequestHandler], Any] = lambda request, handler: (
        200,
        {},
        b"",
    )
    arrived: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@contextlib.contextmanager
def _serve(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Received(self.path, headers, body)
            receiver.requests.append(request)
            receiver.arrived.set()
            reply = receiver.answer(request, self)
            if reply is None:
                return
            status, more, content = reply
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **more}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # the sender hangs up where it should

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def serve() -> Any:
    """A context manager that runs one more receiver, with TLS where a context is given."""
    return _serve


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with _serve() as running:
        yield running


def _settings(**changes: Any) -> WebhookSettings:
    """Settings that allow these receivers."""
    return WebhookSettings(
        **{"allow_http": True, "allowed_networks_text": LOOPBACK, "timeout": 10} | changes
    )


@pytest.fixture
def webhook_settings() -> Any:
    """A function that makes such settings, with changes."""
    return _settings


class Hooks:
    """The delivery loop, turned by hand, and what tests do with it."""

    def __init__(self, service: Any, user: Any) -> None:
        self.service = service
        self.user = user
        self.sender = Sender(service.settings.webhooks)
        self.loop = Deliveries(service.settings)

    def use(self, **changes: Any) -> None:
        """Change the settings."""
        self.service.settings.webhooks = _settings(**changes)
        self.sender = Sender(self.service.settings.webhooks)
        self.loop = Deliveries(self.service.settings)

    async def make(self, url: str, **changes: Any) -> dict[str, Any]:
        answer = await self.user.post("/webhooks", json={"url": url} | changes)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    async def deliver(self) -> None:
        """Everything that is due now, to its end."""
        await self.loop.tick(self.sender)
        await self.loop.settle()

    async def make_due(self) -> None:
        """Let the pauses pass."""
        await self.service.sql(
            "UPDATE webhook_deliveries SET next_attempt_at = now() WHERE status = 'pending'"
        )
        await self.service.sql("UPDATE webhooks SET not_before = NULL")

    async def log(self, webhook_id: str) -> list[dict[str, Any]]:
        """The deliveries, the oldest first."""
        items = (await self.user.get(f"/webhooks/{webhook_id}/deliveries")).json()["items"]
        return list(reversed(items))

    async def linked(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """The events that a payload's link leads to."""
        link = payload["data"]["links"]["event"].removeprefix("/v1")
        return list((await self.user.get(link)).json()["items"])

    async def show(self, webhook_id: str) -> dict[str, Any]:
        return dict((await self.user.get(f"/webhooks/{webhook_id}")).json())


@pytest.fixture
async def hooks(lone_service: Any) -> Any:
    lone_service.settings.webhooks = _settings()
    hooks = Hooks(lone_service, await lone_service.user("ada"))
    yield hooks
    await hooks.sender.close()
    await hooks.loop._database.close()
