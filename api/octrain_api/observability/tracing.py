"""Traces from the submission of a job to its first step, where the operator wants them.

The trace context of the request that made a job (W3C `traceparent`) is stored with the job. It goes
with the message to the node, with the claim to the supervisor, and in the trainer's environment as
`TRACEPARENT`. Spans of one job: the request, `relay` (placed to sent), `claim` (placed to claimed)
and `first step` (claimed to the first training record).
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
Attributes = Mapping[str, str | int | float]


def sane_traceparent(given: str | None) -> str | None:
    """The caller's trace context where it is one (https://www.w3.org/TR/trace-context/)."""
    return given if given is not None and _TRACEPARENT.fullmatch(given) else None


@dataclass
class Span:
    """One span that is open: where its children belong, and what is said of it at its end."""

    traceparent: str | None = None
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    name: str | None = None
    failed: bool = False


class Tracing:
    """Traces nothing: what stands in where tracing is off."""

    enabled = False

    @contextmanager
    def span(self, name: str, parent: str | None) -> Iterator[Span]:
        """Around some work; children are made with the span's `traceparent`."""
        yield Span()

    def record(
        self, name: str, parent: str | None, began: datetime, attributes: Attributes
    ) -> None:
        """Note work that began then and ends now; nothing without a parent."""

    def close(self) -> None:
        """Send what has not been sent, within seconds."""


def job_attributes(job_id: str, attempt: Any = None) -> dict[str, str | int | float]:
    """What every span of a job says."""
    found: dict[str, str | int | float] = {"octrain.job_id": job_id}
    if attempt is not None:
        found |= {"octrain.attempt_id": attempt.id, "octrain.attempt": attempt.number}
    return found
