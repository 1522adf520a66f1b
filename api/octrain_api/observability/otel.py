"""Tracing through OpenTelemetry's SDK, sent in batches over OTLP/HTTP by a thread of its own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from octrain_api.observability.tracing import Attributes, Span, Tracing
from octrain_api.settings import TracingSettings


def _parent_of(traceparent: str | None) -> Context | None:
    if traceparent is None:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    context = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(context), Context())


def _traceparent_of(span: trace.Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class OtelTracing(Tracing):
    """Spans to one collector. A collector that is away costs spans, never a request."""

    enabled = True

    def __init__(self, settings: TracingSettings, service: str) -> None:
        # Not the process's global provider: an embedding program may have its own.
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample)),
            resource=Resource.create({"service.name": service}),
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint, timeout=5))
        )
        self._tracer = self._provider.get_tracer("octrain")

    @contextmanager
    def span(self, name: str, parent: str | None) -> Iterator[Span]:
        """A server's span; what is set on the yielded one is said at the end."""
        context = _parent_of(parent) or Context()
        with self._tracer.start_as_current_span(
            name, context, SpanKind.SERVER, record_exception=False
        ) as span:
            told = Span(_traceparent_of(span))
            try:
                yield told
            finally:
                span.set_attributes(told.attributes)
                if told.name is not None:
                    span.update_name(told.name)
                if told.failed:
                    span.set_status(Status(StatusCode.ERROR))

    def record(
        self, name: str, parent: str | None, began: datetime, attributes: Attributes
    ) -> None:
        """A span of work that is over already."""
        context = _parent_of(parent)
        if context is None:
            return
        start = int(began.timestamp() * 1e9)
        span = self._tracer.start_span(name, context, start_time=start, attributes=attributes)
        span.end(max(time.time_ns(), start))

    def close(self) -> None:
        """Send the rest."""
        self._provider.shutdown()
