"""What is being done now, for whoever logs it: the request, or the job and attempt at hand."""

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class Work:
    """One request or one step of a loop. `scope` is the request's, which routing fills in."""

    request_id: str = ""
    job_id: str = ""
    attempt_id: str = ""
    # The W3C trace context of its span, where tracing is on.
    traceparent: str | None = None
    scope: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def fields(self) -> dict[str, str]:
        """What is known of it, by the names that logs use."""
        parameters = self.scope.get("path_params") or {}
        found = {
            "request_id": self.request_id,
            "job_id": self.job_id or parameters.get("job_id", ""),
            "attempt_id": self.attempt_id or parameters.get("attempt_id", ""),
        }
        return {name: str(value) for name, value in found.items() if value}


_current: ContextVar[Work | None] = ContextVar("octrain_work", default=None)


def current() -> Work | None:
    """The work of this task, if any was begun."""
    return _current.get()


def current_traceparent() -> str | None:
    """The trace context of this task's work; None where tracing is off."""
    work = _current.get()
    return work.traceparent if work is not None else None


@contextmanager
def begun(work: Work) -> Iterator[Work]:
    """Let `work` be what this task does."""
    token = _current.set(work)
    try:
        yield work
    finally:
        _current.reset(token)


def request_id_from(given: str | None) -> str:
    """The caller's `X-Request-ID` where it is 1 to 128 plain characters, else a new one."""
    if given is not None and _SANE_ID.fullmatch(given):
        return given
    return f"req_{secrets.token_hex(12)}"
