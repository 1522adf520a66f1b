"""What readers see of jobs, in rows: one statement reads the jobs, their attempts, what they wait
for and their places in the queue.

What is JSON in the database already, the spec above all, is read as text: `octrain_api.jobs.views`
puts it into the answer as it is, and it is neither parsed nor built again.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from octrain_api.direct import Connection
from octrain_api.jobs.repository import FARTHEST_POSITION, NEWEST_FIRST, ORDERS, JobFilter, JobOrder
from octrain_api.jobs.transitions import Status

# What a job waits for from its entry into the queue until the scheduler has looked at it.
THE_SCHEDULER = "the scheduler"
# Before an owner's name: the key under which it is told that no more of their jobs may run.
OF_OWNER = "owner:"
_DEFAULT_RESTARTS = 3


class JobRow(NamedTuple):
    """What is shown of a job. `labels`, `latest_metrics`, `spec`, `spec_given`, `recipe_from` and
    `attempts` are JSON texts; `spec_given` is read of one job alone; `position`, `group_says` and
    `as_of` are of queued jobs."""

    id: str
    name: str | None
    labels: str
    notes: str
    priority: int
    owner: str
    status: str
    total_steps: int | None
    version: int
    sequence: int
    created_at: datetime
    spec: str | None
    recipe_from: str | None
    max_restarts: str | None
    # As they are when nothing has happened to the job yet.
    reason: str | None = None
    detail: str | None = None
    step: int = 0
    tokens: int = 0
    eta_seconds: float | None = None
    latest_metrics: str | None = None
    attempt: int = 0
    restarts: int = 0
    next_attempt_at: datetime | None = None
    stop_deadline_at: datetime | None = None
    device: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    spec_given: str | None = None
    attempts: str | None = None
    position: int | None = None
    group_says: str | None = None
    as_of: datetime | None = None

    @property
    def waiting_for(self) -> str | None:
        """What a queued job waits for."""
        if self.status != Status.QUEUED:
            return None
        start = self.next_attempt_at
        if start is not None and (self.as_of is None or start > self.as_of):
            most = self.max_restarts if self.max_restarts is not None else _DEFAULT_RESTARTS
            pause = f"the pause before restart {self.restarts} of {most}"
            return f"{pause}: not before {start.isoformat(timespec='seconds')}"
        return self.group_says if self.group_says is not None else THE_SCHEDULER


# Not read where nobody asked for them: they are most of a job's bytes.
_LARGE = frozenset({"latest_metrics", "spec"})
_OF_ONE = "spec_given"
_JSON = frozenset({"labels", "recipe_from", _OF_ONE, *_LARGE})
_OF_JOB = JobRow._fields[: JobRow._fields.index("attempts")]
# For `waiting_for`; to look into a spec costs more than to show it.
_MAX_RESTARTS = (
    "CASE WHEN status = 'queued' AND next_attempt_at IS NOT NULL "
    "THEN spec -> 'limits' ->> 'max_restarts' END AS max_restarts"
)

_TIME = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
_ATTEMPT = ", ".join(
    f"'{name}', {column}"
    for name, column in {
        "id": "a.id",
        "number": "a.number",
        "node": "n.name",
        "status": "a.status",
        "phase": "a.phase",
        "device": "a.device",
        "created_at": _TIME.format("a.created_at"),
        "started_at": _TIME.format("a.claimed_at"),
        "ended_at": _TIME.format("a.ended_at"),
        "outcome": "a.outcome",
        "reason": "a.reason",
        "detail": "a.detail",
        "step": "a.step",
        "stalled_since": _TIME.format("a.stalled_since"),
        "unreachable_since": _TIME.format("a.unreachable_since"),
    }.items()
)
# All that is put together here are names of this module.
_ATTEMPTS = f"""(
    SELECT json_agg(json_build_object({_ATTEMPT}) ORDER BY a.number)::text
    FROM attempts a JOIN nodes n ON n.id = a.node_id WHERE a.job_id = page.id)"""  # noqa: S608
# The queue is only looked at where a queued job is among those that were found.
_OBJECTS = f"""
    WITH page AS MATERIALIZED (SELECT {{columns}}, need FROM jobs {{rest}}),
    ranked AS (
        SELECT id, row_number() OVER (ORDER BY priority DESC, created_at, id) AS position
        FROM (
            SELECT id, priority, created_at FROM jobs
            WHERE status = 'queued' AND EXISTS (SELECT FROM page WHERE page.status = 'queued')
            ORDER BY priority DESC, created_at, id LIMIT {FARTHEST_POSITION}) AS first)
    SELECT {{names}}, {{attempts}}, ranked.position, said.waiting_for, said.as_of
    FROM page LEFT JOIN ranked ON ranked.id = page.id LEFT JOIN LATERAL (
        SELECT g.waiting_for, g.as_of FROM queue_groups g
        WHERE page.status = 'queued' AND g.need IN ('{OF_OWNER}' || page.owner, page.need)
        ORDER BY g.need = page.need LIMIT 1) AS said ON true
"""  # noqa: S608


def objects_of(rest: str, fields: Collection[str] | None = None, *, whole: bool = False) -> str:
    """SQL of the `JobRow`s of what `SELECT ... FROM jobs {rest}` finds, in no order.

    With `fields` the large members that it does not name are not read; only a `whole` row has
    what is shown of one job alone.
    """
    columns = []
    unread = frozenset() if fields is None else _LARGE.difference(fields)
    if not whole:
        unread |= {_OF_ONE}
    for name in _OF_JOB:
        if name == "max_restarts":
            columns.append(_MAX_RESTARTS)
        elif name in unread:
            columns.append(f"NULL AS {name}")
        else:
            columns.append(f"{name}::text" if name in _JSON else name)
    return _OBJECTS.format(
        columns=", ".join(columns),
        rest=rest,
        names=", ".join(f"page.{name}" for name in _OF_JOB),
        attempts=_ATTEMPTS if fields is None or "attempts" in fields else "NULL",
    )


_ONE = objects_of("WHERE id = %(id)s AND deleted_at IS NULL", whole=True)


class JobRows:
    """Reads rows over a connection, within whatever transaction that is in."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def get(self, job_id: str) -> JobRow | None:
        """One job, unless it is deleted."""
        row = await (await self._connection.execute(_ONE, {"id": job_id})).fetchone()
        return JobRow(*row) if row is not None else None

    async def page(
        self,
        owner: str | None,
        job_filter: JobFilter,
        limit: int,
        after: tuple[Any, str] | None,
        order: JobOrder = NEWEST_FIRST,
        fields: Collection[str] | None = None,
    ) -> Sequence[JobRow]:
        """Up to `limit` jobs in this order, behind the row (value of the order, id) `after`.

        With `fields` what is large and not named by it is not read.
        """
        where, values = job_filter.conditions(owner)
        column, kind = ORDERS[order.column]
        way, sign = (" DESC", "<") if order.descending else ("", ">")
        if after is not None:
            where.append(f"({column}, id) {sign} (%(after)s::{kind}, %(after_id)s)")
            values |= {"after": after[0], "after_id": after[1]}
        by = f"ORDER BY {column}{way}"
        chosen = f"WHERE {' AND '.join(where)} {by}, id{way} LIMIT %(limit)s"
        # The rows of the page lose their order where something is joined to them.
        statement = objects_of(chosen, fields) + f"{by}, page.id{way}"
        found = await self._connection.execute(statement, values | {"limit": limit})
        return [JobRow(*row) for row in await found.fetchall()]
