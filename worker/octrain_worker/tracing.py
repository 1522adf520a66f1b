"""What a node adds to the trace of a job: from the message to the trainer's first step.

The context (W3C ``traceparent``) of the request that made the job comes with Celery's message, and
again with the claim. Below it stand ``run attempt`` (given to its supervisor, until the first step)
and, below that, ``claim request``, ``prepare``, ``start trainer`` and a span for each phase of the
trainer, as ``trainer loading``. The API's spans of the claim's request, and whatever the trainer
itself may trace (``TRACEPARENT`` in its environment), stand below ``run attempt`` as well. Of the
steps that follow nothing is traced; an attempt that ends before its first step is a span that
failed.

Spans carry ids and phases, never a spec, a path, an address or a key. Without an endpoint nothing
of OpenTelemetry is imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from typing import Any

from octrain_worker.settings import TracingSettings

__all__ = ["AttemptTrace", "attempt_trace", "check_tracing", "sane_traceparent"]

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def sane_traceparent(given: Any) -> str | None:
    """A trace context where it is one (https://www.w3.org/TR/trace-context/)."""
    return given if isinstance(given, str) and _TRACEPARENT.fullmatch(given) else None


class AttemptTrace:
    """Traces nothing: what stands in where tracing is off, and for an attempt without a trace."""

    # What children of the attempt's span are made with; None where there is none.
    traceparent: str | None = None

    def taken(self, ids: Mapping[str, str | int]) -> None:
        """The attempt was given to this process: here its span begins, once it has a parent."""

    def begin(self, parent: str | None) -> None:
        """Open the attempt's span below ``parent``; without one, or when it is open, nothing."""

    def part(self, name: str, began_at: float) -> None:
        """Note work of the supervisor that began then and ends now."""

    def hear(self, records: Iterable[dict[str, Any]]) -> None:
        """Learn from what the trainer told: its phases, and the first step, which ends the span."""

    def ordered(self) -> None:
        """The trainer was told what to train."""

    def close(self) -> None:
        """End what is open, and send what was not sent, within two seconds."""


def check_tracing(settings: TracingSettings) -> str | None:
    """Why the settings cannot be followed on this machine; None when they can."""
    if settings.endpoint is None:
        return None
    for package in _PACKAGES:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return (
                f"OCTRAIN_TRACING_ENDPOINT is set, but {package} is not installed: "
                "pip install 'octrain[tracing]'"
            )
    return None


def attempt_trace(settings: TracingSettings) -> AttemptTrace:
    """A trace for the next attempt of this process, to the endpoint of the settings, or none."""
    if settings.endpoint is None or check_tracing(settings) is not None:
        return AttemptTrace()
    from octrain_worker.otel import OtelAttemptTrace

    return OtelAttemptTrace(settings.endpoint)
