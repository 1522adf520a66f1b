"""Jobs as the JSON that readers get, in the form of `schemas.JobObject`, and of one alone in
that of `schemas.JobDetail`."""

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from json.encoder import encode_basestring
from math import isfinite

from octrain_api.jobs.rows import OF_OWNER as OF_OWNER
from octrain_api.jobs.rows import THE_SCHEDULER as THE_SCHEDULER
from octrain_api.jobs.rows import JobRow
from octrain_api.jobs.transitions import FINAL


def _text(value: str | None) -> str:
    return encode_basestring(value) if value is not None else "null"


def _number(value: float | None) -> str:
    return repr(value) if value is not None and isfinite(value) else "null"


def _time(value: datetime | None) -> str:
    if value is None:
        return "null"
    return f'"{value.astimezone(UTC).isoformat().removesuffix("+00:00")}Z"'


def _progress(row: JobRow) -> str:
    return (
        f'{{"step":{row.step},"total_steps":{_number(row.total_steps)},"tokens":{row.tokens},'
        f'"eta_seconds":{_number(row.eta_seconds)}}}'
    )


def _links(row: JobRow) -> str:
    base = f"/v1/jobs/{row.id}"
    return "".join((f'{{"self":"{base}"', *(f',"{part}":"{base}/{part}"' for part in _PARTS), "}"))


_PARTS = ("events", "metrics", "logs", "stream", "artifacts", "conversion", "precision")
# By the members of `schemas.JobObject`, in its order.
MEMBERS: dict[str, Callable[[JobRow], str]] = {
    "id": lambda row: f'"{row.id}"',
    "name": lambda row: _text(row.name),
    "labels": lambda row: row.labels,
    "notes": lambda row: _text(row.notes),
    "priority": lambda row: str(row.priority),
    "owner": lambda row: _text(row.owner),
    "status": lambda row: f'"{row.status}"',
    "is_final": lambda row: "true" if row.status in FINAL else "false",
    "reason": lambda row: _text(row.reason),
    "detail": lambda row: _text(row.detail),
    "progress": _progress,
    "latest_metrics": lambda row: row.latest_metrics or "{}",
    "attempts": lambda row: row.attempts or "[]",
    "attempt": lambda row: str(row.attempt),
    "restarts": lambda row: str(row.restarts),
    "waiting_for": lambda row: _text(row.waiting_for),
    "queue_position": lambda row: _number(row.position),
    "queue_as_of": lambda row: _time(row.as_of),
    "next_attempt_at": lambda row: _time(row.next_attempt_at),
    "stop_deadline_at": lambda row: _time(row.stop_deadline_at),
    "version": lambda row: str(row.version),
    "last_event": lambda row: str(row.sequence),
    "device": lambda row: _text(row.device),
    "created_at": lambda row: _time(row.created_at),
    "started_at": lambda row: _time(row.started_at),
    "ended_at": lambda row: _time(row.ended_at),
    "spec": lambda row: row.spec or "{}",
    "recipe_from": lambda row: row.recipe_from or "null",
    "links": _links,
}


def detail_of(row: JobRow) -> str:
    """The JSON of a job that was asked for by itself."""
    return f'{json_of(row)[:-1]},"spec_given":{row.spec_given or "null"}}}'


def json_of(row: JobRow, fields: Collection[str] | None = None) -> str:
    """The job's JSON; of `fields`, where given, these members alone."""
    parts = [
        f'"{name}":{render(row)}'
        for name, render in MEMBERS.items()
        if fields is None or name in fields
    ]
    return "".join(("{", ",".join(parts), "}"))
