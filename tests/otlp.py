"""A receiver of OpenTelemetry spans, as a collector is one: OTLP over HTTP, in protobuf."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Keeps what it was sent: ``spans`` by their names, ``bodies`` as they came."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Any]] = {}
        self.bodies: list[bytes] = []
        self._came = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                outer.take(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._came:
            self.bodies.append(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.setdefault(span.name, []).append(span)
            self._came.notify_all()

    def until(self, true: Callable[[dict[str, list[Any]]], Any], seconds: float = 60.0) -> None:
        """Return once the spans are as wanted; fails with their names when they never are."""
        deadline = time.monotonic() + seconds
        with self._came:
            while not true(self.spans):
                left = deadline - time.monotonic()
                assert left > 0, f"not within {seconds:g} s; there are {sorted(self.spans)}"
                self._came.wait(left)

    def of_trace(self, trace_id: str) -> list[Any]:
        """The spans of one trace."""
        with self._came:
            found = [span for spans in self.spans.values() for span in spans]
        return [span for span in found if span.trace_id.hex() == trace_id]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    """What a span says of itself, with each value as what it is."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
