"""An attempt's trace through OpenTelemetry's SDK, sent over OTLP/HTTP by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from octrain_worker.tracing import AttemptTrace, sane_traceparent

__all__ = ["OtelAttemptTrace"]

# A collector that is away costs the end of an attempt no more than this.
_CLOSE_SECONDS = 2.0


class OtelAttemptTrace(AttemptTrace):
    """Spans of one attempt to one collector; one that is away costs spans, never a step.

    Used by the supervisor's main thread, but for ``part``, which any thread may call. The thread
    that sends begins with the span, after the trainer was started, and ends after the first step.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._provider: TracerProvider | None = None
        self._span: Span | None = None
        self._sending: threading.Thread | None = None
        # The trainer's phase that lasts, and since when.
        self._phase: tuple[str, float] | None = None
        self._taken_at = time.time()
        self._ids: dict[str, str | int] = {}

    def taken(self, ids: Mapping[str, str | int]) -> None:
        """From now on."""
        self._taken_at = time.time()
        self._ids = {f"octrain.{name}": value for name, value in ids.items()}

    def begin(self, parent: str | None) -> None:
        """Opens the span; whether it is sampled was decided where the trace began."""
        sane = sane_traceparent(parent)
        if self._span is not None or sane is None:
            return
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_OFF),
            resource=Resource.create({"service.name": "octrain-worker"}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=self._endpoint, timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._span = self._provider.get_tracer("octrain").start_span(
            "run attempt",
            _context_of(sane),
            kind=SpanKind.CONSUMER,
            start_time=_nanoseconds(self._taken_at),
            attributes=self._ids,
        )
        context = self._span.get_span_context()
        self.traceparent = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        )

    def part(self, name: str, began_at: float) -> None:
        """A span below the attempt's, from then to now."""
        self._record(name, began_at, time.time())

    def ordered(self) -> None:
        """The trainer is starting."""
        self._phase = ("start trainer", time.time())

    def hear(self, records: Iterable[dict[str, Any]]) -> None:
        """A phase ends where the next begins; the first step ends the last, and the span."""
        if self._span is None or self._sending is not None:
            return
        for record in records:
            at = record.get("time")
            if not isinstance(at, int | float):
                continue
            if record["type"] == "phase":
                self._end_phase(at)
                self._phase = (f"trainer {record.get('phase')}", at)
            elif self._is_first_step(record):
                self._end_phase(at)
                self._span.end(_nanoseconds(at))
                self._send()
                return

    def close(self) -> None:
        """What is open had not come to its first step."""
        if self._span is not None and self._sending is None:
            now = time.time()
            self._end_phase(now)
            self._span.set_status(Status(StatusCode.ERROR, "it ended before its first step"))
            self._span.end(_nanoseconds(now))
            self._send()
        if self._sending is not None:
            self._sending.join(_CLOSE_SECONDS)

    def _is_first_step(self, record: dict[str, Any]) -> bool:
        training = self._phase is not None and self._phase[0] == "trainer training"
        return training and record["type"] in ("metrics", "progress") and bool(record.get("step"))

    def _end_phase(self, at: float) -> None:
        if self._phase is not None:
            self._record(*self._phase, at)
            self._phase = None

    def _record(self, name: str, began_at: float, ended_at: float) -> None:
        with self._lock:
            if self._provider is None or self._span is None or self._sending is not None:
                return
            start = _nanoseconds(began_at)
            span = self._provider.get_tracer("octrain").start_span(
                name, trace.set_span_in_context(self._span, Context()), start_time=start
            )
            span.end(max(_nanoseconds(ended_at), start))

    def _send(self) -> None:
        """Sends everything and ends the sending thread, without keeping the caller."""
        with self._lock:
            assert self._provider is not None
            self._sending = threading.Thread(
                target=self._provider.shutdown, name="traces", daemon=True
            )
        self._sending.start()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _context_of(traceparent: str) -> Context:
    _, trace_id, span_id, flags = traceparent.split("-")
    parent = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
