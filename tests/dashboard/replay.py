"""A recorded live stream of a job, played at speed to the real page.

All other requests of the page go on to the real service, so that what it reads anew while the
stream plays is what the service has.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx

_NOT_ON = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


class Recording:
    """The messages of a job's stream, as they come while the block runs, all metrics among them."""

    def __init__(self, service: Any, job_id: str) -> None:
        self.messages: list[bytes] = []
        self._service, self._job_id = service, job_id
        self._opened = threading.Event()
        self._until: int | None = None
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Recording:
        self._thread.start()
        assert self._opened.wait(60), "the stream opens"
        return self

    def __exit__(self, *_: object) -> None:
        """The recording ends with the newest message that there is now."""
        self._until = int(self._service.object(self._job_id)["last_event"])
        self._thread.join(120)
        assert not self._thread.is_alive(), f"{len(self.messages)} messages came, not all"

    def _listen(self) -> None:
        stack = self._service.stack
        last = self._service.object(self._job_id)["last_event"]
        url = f"{stack.url}/v1/jobs/{self._job_id}/stream?include=status,events,metrics"
        headers = {"Authorization": f"Bearer {stack.api_key}"}
        with (
            httpx.Client(trust_env=False, timeout=60) as http,
            http.stream("GET", f"{url}&after={last}", headers=headers) as answer,
        ):
            self._opened.set()
            message: list[str] = []
            for line in answer.iter_lines():
                if line:
                    message.append(line)
                    continue
                if any(each.startswith("event:") for each in message):
                    self.messages.append(("\n".join(message) + "\n\n").encode())
                for each in message:
                    if each.startswith("id:"):
                        last = int(each.removeprefix("id:"))
                message = []
                if self._until is not None and last >= self._until:
                    return


class Player(ThreadingHTTPServer):
    """Stands before the service, and plays the recording to whoever opens a job's stream."""

    daemon_threads = True

    def __init__(self, url: str, messages: Sequence[bytes], per_second: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.service = urlsplit(url).netloc
        self.messages, self.per_second = messages, per_second
        self.begin = threading.Event()
        self.played = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def playing(url: str, messages: Sequence[bytes], per_second: float) -> Iterator[Player]:
    """A player before the service; it plays from `begin` on, and ends with the block."""
    player = Player(url, messages, per_second)
    thread = threading.Thread(target=player.serve_forever, daemon=True)
    thread.start()
    try:
        yield player
    finally:
        player.begin.set()
        player.shutdown()
        player.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Player

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/v1/jobs/") and path.endswith("/stream"):
            self._play()
        else:
            self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def log_message(self, *_: object) -> None:
        """Nothing: a page asks for much."""

    def _play(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.wfile.write(b": here\n\n")
            self.server.begin.wait(120)
            began = time.monotonic()
            for number, message in enumerate(self.server.messages):
                # In step with the clock, not with the time that writing takes.
                ahead = began + number / self.server.per_second - time.monotonic()
                if ahead > 0:
                    time.sleep(ahead)
                self.wfile.write(message)
            self.server.played.set()
            # The job goes on: a stream that ended would be opened again.
            while True:
                time.sleep(1)
                self.wfile.write(b": here\n\n")
        except OSError:
            return

    def _pass_on(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        upstream = http.client.HTTPConnection(self.server.service, timeout=60)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            upstream.close()
        try:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _NOT_ON:
                    self.send_header(name, value)
            if answer.status != 304:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            # The page no longer wants to know.
            self.close_connection = True
