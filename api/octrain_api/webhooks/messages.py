"""What a webhook says: the type of an event, who wants it, and the body that is signed and sent."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from octrain_api.jobs.transitions import Status
from octrain_api.models import Event, Job

TEST_TYPE = "webhook.test"
# Standard Webhooks asks for bodies below 20 kB; what is larger is fetched by its link.
MOST_BYTES = 20_000
_SHORT_TEXT = 1000
_STATUS_TYPES = frozenset(f"job.{status.value}" for status in Status)
_OTHER = "job.event."
# What filters may be, as the OpenAPI document tells it.
PATTERN_TOLD = rf"^job\.(\*|event\.\*|event\.[A-Za-z0-9_]{{1,64}}|{'|'.join(sorted(Status))})$"
_PATTERN = re.compile(r"^job\.(\*|event\.\*|[a-z]+|event\.[A-Za-z0-9_]{1,64})$")


def event_type(kind: str, data: Mapping[str, Any]) -> str:
    """`job.<status>` for a change of status, else `job.event.<kind>`."""
    if kind == "status" and f"job.{data.get('to')}" in _STATUS_TYPES:
        return f"job.{data['to']}"
    return _OTHER + re.sub(r"[^A-Za-z0-9_]", "_", kind)


def pattern_problem(pattern: str) -> str | None:
    """What is wrong with a filter of event types, or None."""
    if not _PATTERN.match(pattern):
        return (
            f"{pattern!r} names no events: use job.<status>, job.event.<kind>, job.event.* or job.*"
        )
    if pattern.startswith(_OTHER) or pattern == "job.*" or pattern in _STATUS_TYPES:
        return None
    return f"{pattern!r} is no status of a job; there are {', '.join(sorted(_STATUS_TYPES))}"


def wants(
    patterns: Sequence[str], labels: Mapping[str, str], kind: str, job_labels: Mapping[str, str]
) -> bool:
    """Whether an event of type `kind` passes both filters. Every label must be there as given."""
    if any(job_labels.get(name) != value for name, value in labels.items()):
        return False
    return any(
        kind == pattern or (pattern.endswith(".*") and kind.startswith(pattern[:-1]))
        for pattern in patterns
    )


def message_id(event: Event) -> str:
    """The same for the same event, however often and wherever it is sent."""
    return f"msg_{event.job_id.removeprefix('job_')}_{event.seq}"


def event_body(event: Event, job: Job) -> str:
    """The JSON text of an event. Beyond `MOST_BYTES` its data stay behind the link."""
    kind = event_type(event.kind, event.data)
    told: dict[str, Any] = {
        "seq": event.seq,
        "kind": event.kind,
        "actor": event.actor,
        "message": event.message,
        "attempt": event.attempt,
        "data": event.data,
        "truncated": False,
    }
    text = _body(kind, event.time, job, told)
    if len(text.encode()) > MOST_BYTES:
        told |= {"message": event.message[:_SHORT_TEXT], "data": None, "truncated": True}
        text = _body(kind, event.time, job, told)
    return text


def test_body(now: datetime) -> str:
    """The JSON text of a test call."""
    data = {"message": "A test call of this webhook; no job is concerned."}
    return _json({"type": TEST_TYPE, "timestamp": now.isoformat(), "data": data})


def _body(kind: str, time: datetime, job: Job, told: dict[str, Any]) -> str:
    # Only what stays as it is: the job's state may be another one by the time of sending.
    subject = {"id": job.id, "owner": job.owner, "name": job.name, "labels": job.labels}
    links = {
        "job": f"/v1/jobs/{job.id}",
        "event": f"/v1/jobs/{job.id}/events?after={told['seq'] - 1}&limit=1",
    }
    data = {"job": subject, "event": told, "links": links}
    return _json({"type": kind, "timestamp": time.isoformat(), "data": data})


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
