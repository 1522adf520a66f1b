"""Connections that cannot be held for nothing: uvicorn's protocol with bounds on slow clients.

Without them a client that sends a byte a second, or opens a stream and never reads it, keeps a
connection and its buffers for as long as it likes.
"""

import asyncio
import json
import weakref
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from octrain_api.problem_kinds import KINDS
from octrain_api.settings import HttpSettings

# The extension of a request's scope that is a `BodyOffer`.
OFFER = "octrain.offer"


class BodyOffer:
    """Writes a part of an answer that has begun, past the application's coroutines.

    A live stream that tells a thousand clients the same would else wake a thousand tasks, each
    through every layer of the application, for one write of a few bytes each.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # Weakly: a scope that held its own request would be left to the garbage collector.
        self._cycle = weakref.ref(cycle)

    def __call__(self, body: bytes) -> bool:
        """Whether the part was written: not where the client has not taken what came before, nor
        where the answer has not begun, is over, or is not sent in chunks.
        """
        cycle = self._cycle()
        if cycle is None or not cycle.response_started or not cycle.chunked_encoding:
            return False
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        if cycle.transport.is_closing():
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True


@dataclass(frozen=True)
class _Phase:
    """Which part of a request is awaited, if any."""

    name: str


_IDLE, _HEAD, _BODY, _ENDED = _Phase("idle"), _Phase("head"), _Phase("body"), _Phase("ended")
# How long an ended connection still takes what the client sends: closed at once, the kernel would
# answer the bytes that nobody read by a reset, and the client would lose the problem document.
_LINGER = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `settings` are those of the class that `bounded_protocol` makes.

    * The head of a request must be there `head_timeout` seconds after its first byte (the first
      one: after the connection was made) and is not read beyond `max_head_bytes`.
    * A body may take `body_grace` seconds, and one more for each `min_body_rate` bytes of it.
    * What is written must be taken within `write_timeout` seconds, else the connection is cut.
    """

    settings: HttpSettings

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin with a deadline for the first request."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._phase = _HEAD
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_from = 0.0
        if len(self.connections) > self.settings.max_connections:
            self._refuse("overloaded", "Too many connections are open; try again shortly.")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """No deadline outlives the connection."""
        self._stop(self._timer)
        self._stop(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count what belongs to a head that is not whole yet."""
        if self._phase is _ENDED or self.transport.is_closing():
            return
        if self._phase is _IDLE:
            self._phase, self._head_bytes = _HEAD, 0
            self._await_head()
        super().data_received(data)
        if self._phase is _HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > self.settings.max_head_bytes:
                limit = self.settings.max_head_bytes
                self._refuse("head-too-large", f"The head of a request has {limit} bytes at most.")

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed gets a problem document too."""
        self._refuse("bad-request", msg)

    def on_message_begin(self) -> None:
        """A request begins: the next of a pipeline, perhaps, in the middle of received data."""
        self._phase = _HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there; the body has time by its size."""
        self._stop(self._timer)
        self._phase, self._head_bytes = _BODY, 0
        self._body_bytes, self._body_from = 0, self.loop.time()
        self._timer = self.loop.call_later(self.settings.body_grace, self._check_body)
        super().on_headers_complete()
        extensions: dict[Any, Any] = self.scope.setdefault("extensions", {})
        extensions[OFFER] = BodyOffer(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Bytes buy time."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole; how long its answer takes is the service's own affair."""
        self._stop(self._timer)
        self._phase = _IDLE
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client takes nothing at present."""
        super().pause_writing()
        self._stop(self._write_timer)
        self._write_timer = self.loop.call_later(self.settings.write_timeout, self._cut)

    def resume_writing(self) -> None:
        """The client has taken what there was."""
        self._stop(self._write_timer)
        super().resume_writing()

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

    def _await_head(self) -> None:
        self._stop(self._timer)
        self._timer = self.loop.call_later(self.settings.head_timeout, self._check_head)

    def _check_head(self) -> None:
        if self._phase is not _HEAD or self.transport.is_closing():
            return
        if self.flow.read_paused:  # a pipeline waits for its own earlier answers
            self._await_head()
        elif self._head_bytes == 0:
            self.transport.close()
        else:
            seconds = self.settings.head_timeout
            self._refuse("request-timeout", f"The head did not arrive within {seconds:g} s.")

    def _check_body(self) -> None:
        if self._phase is not _BODY or self.transport.is_closing():
            return
        now = self.loop.time()
        if self.flow.read_paused:  # it is we who do not read
            self._body_bytes, self._body_from = 0, now
        settings = self.settings
        left = settings.body_grace + self._body_bytes / settings.min_body_rate
        left -= now - self._body_from
        if left > 0:
            self._timer = self.loop.call_later(max(left, 0.1), self._check_body)
            return
        rate = settings.min_body_rate
        self._refuse("request-timeout", f"The body came slower than {rate:g} bytes a second.")

    def _refuse(self, name: str, detail: str) -> None:
        """Answer outside of the application, and end the connection."""
        self._stop(self._timer)
        if self._phase is _ENDED or self.transport.is_closing():
            return
        self._phase = _ENDED
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # The application is told that its client has gone, and writes nothing any more.
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(problem_bytes(name, detail))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._timer = self.loop.call_later(_LINGER, self.transport.close)
        else:  # TLS, whose close is a message of its own
            self.transport.close()

    def _cut(self) -> None:
        # close() would wait for the very client that takes nothing.
        self.transport.abort()


def problem_bytes(name: str, detail: str) -> bytes:
    """A whole HTTP/1.1 answer that is a problem document and the last of its connection."""
    kind = KINDS[name]
    status = kind.statuses[0]
    body = json.dumps(
        {"type": f"/problems/{name}", "title": kind.title, "status": status, "detail": detail}
    ).encode()
    head = [
        b"content-type: application/problem+json",
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    if status == 503:
        head.append(b"retry-after: 2")
    return STATUS_LINE[status] + b"\r\n".join([*head, b"", b""]) + body


def bounded_protocol(settings: HttpSettings) -> type[Any]:
    """The protocol class for these settings, as uvicorn's option `http` takes it."""
    return type("OctrainProtocol", (BoundedProtocol,), {"settings": settings})
