"""New jobs in the database, in one statement: themselves, their first events, their
Idempotency-Keys, their entries in the audit log.

A statement is a transaction, so jobs that need nothing else asked beforehand cost one round trip
and one wait for the disk, however many they are (`octrain_api.jobs.together`). It takes no NOTIFY
with it: Postgres commits transactions that notify one after the other, each with a wait for the
disk of its own. Nobody can wait for a job that is not there yet; the scheduler and the streams of
all jobs are told after the commit, and would find it by themselves a little later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic_core import to_json

from octrain_api.controller.placement import Need
from octrain_api.direct import Connection
from octrain_api.idempotency.repository import Claim, Kept
from octrain_api.jobs.repository import FARTHEST_POSITION
from octrain_api.jobs.rows import OF_OWNER, JobRow
from octrain_api.jobs.transitions import Status

# The key's parts are those of `IdempotencyRepository`, but that nothing is made where another
# request's row is there already, seen or not. `unfit` is `controller.placement.never_fits`. An
# earlier request is looked up for each job by itself: joined, all keys of a day would be read.
_STORE = f"""
    WITH judged AS MATERIALIZED (
        SELECT asked.*, earlier.request_hash AS earlier_hash, earlier.target AS earlier_target,
               CASE WHEN key IS NULL THEN true
               ELSE pg_try_advisory_xact_lock(hashtextextended(lock, 0)) END AS is_free,
               unless_quotas AND EXISTS (
                   SELECT FROM owner_quotas AS quota WHERE quota.owner = asked.owner
                   AND (quota.queued IS NOT NULL OR quota.gpu_hours IS NOT NULL))
               OR unless_no_node AND EXISTS (SELECT FROM nodes) AND NOT EXISTS (
                   SELECT FROM nodes AS node
                   WHERE node.engines -> asked.engine ->> 'ok' = 'true' AND (
                       asked.device IN ('cuda', 'auto') AND 'cuda' = ANY (node.device_kinds)
                       AND CASE jsonb_typeof(node.gpus) WHEN 'array'
                           THEN jsonb_array_length(node.gpus) ELSE 0 END >= asked.ranks
                       OR asked.device IN ('cpu', 'auto') AND 'cpu' = ANY (node.device_kinds)
                       AND node.cpu_slots >= greatest(asked.ranks, 1))) AS is_refused
        FROM json_to_recordset(%(asked)s::json) AS asked(
            id text, owner text, key text, lock text, request_hash text,
            unless_quotas boolean, unless_no_node boolean, engine text, device text, ranks int,
            name text, labels jsonb, notes text, priority int, spec json, spec_given jsonb,
            recipe_from jsonb, status text, need text, total_steps bigint, traceparent text,
            version bigint, sequence bigint, queue_seconds float8, actor text, events json,
            entry json)
        LEFT JOIN LATERAL (
            SELECT k.request_hash, k.target FROM idempotency_keys AS k
            WHERE k.owner = asked.owner AND k.key = asked.key
              AND k.created_at > now() - interval '24 hours' LIMIT 1) AS earlier ON true
    ), kept AS (
        INSERT INTO idempotency_keys AS k (owner, key, request_hash, target)
        SELECT owner, key, request_hash, id FROM judged
        WHERE key IS NOT NULL AND is_free AND earlier_target IS NULL AND NOT is_refused
        ON CONFLICT (owner, key) DO UPDATE SET
            request_hash = excluded.request_hash, target = excluded.target, created_at = now()
        WHERE k.created_at <= now() - interval '24 hours'
        RETURNING target
    ), new AS (
        INSERT INTO jobs (id, owner, name, labels, notes, priority, spec, spec_given, recipe_from,
                          status, need, total_steps, traceparent, version, sequence,
                          queue_deadline_at)
        SELECT id, owner, name, labels, notes, priority, spec, spec_given, recipe_from, status,
               need, total_steps, traceparent, version, sequence,
               now() + queue_seconds * interval '1 second'
        FROM judged
        WHERE NOT is_refused AND (key IS NULL OR id IN (SELECT target FROM kept))
        RETURNING id, created_at
    ), told AS (
        INSERT INTO events (job_id, seq, kind, actor, message, data)
        SELECT new.id, e.seq, e.kind, judged.actor, e.message, e.data
        FROM new JOIN judged ON judged.id = new.id, json_to_recordset(judged.events)
            AS e(seq bigint, kind text, message text, data jsonb)
    ), audited AS (
        INSERT INTO audit_log (key_id, owner, address, request_id, method, route, target, status,
                               outcome)
        SELECT a.key_id, a.owner, a.address, a.request_id, a.method, a.route, new.id, a.status,
               a.outcome
        FROM new JOIN judged ON judged.id = new.id, json_to_record(judged.entry)
            AS a(key_id text, owner text, address text, request_id text, method text, route text,
                 status int, outcome text)
        WHERE a.key_id IS NOT NULL
    )
    SELECT judged.id, judged.is_free, judged.earlier_hash, judged.earlier_target,
           judged.is_refused, new.created_at, said.waiting_for, said.as_of, (
               SELECT count(*) FROM (
                   SELECT FROM jobs
                   WHERE jobs.status = 'queued' AND jobs.priority >= judged.priority
                   LIMIT CASE WHEN judged.priority <= %(crowded)s::int THEN 0
                         ELSE {FARTHEST_POSITION} END) AS first) AS ahead
    FROM judged LEFT JOIN new ON new.id = judged.id LEFT JOIN LATERAL (
        SELECT waiting_for, as_of FROM queue_groups AS g
        WHERE g.need IN ('{OF_OWNER}' || judged.owner, judged.need)
        ORDER BY g.need = judged.need LIMIT 1) AS said ON true
"""  # noqa: S608 - all that is put in are names and numbers of this package


@dataclass(frozen=True)
class NewJob:
    """A job that is to be stored. The rest of its row is in its resolved `spec`, or its default.

    `given` is what was written of the spec.
    """

    id: str
    owner: str
    spec: dict[str, Any]
    given: dict[str, Any] | None
    recipe_from: dict[str, Any] | None
    status: Status
    need: Need
    traceparent: str | None


@dataclass(frozen=True)
class FirstEvent:
    """Something to be told of a job from its beginning."""

    kind: str
    message: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Unless:
    """What keeps a job from being stored: what has to be judged, and told, more closely."""

    owner_has_quotas: bool = False
    no_node_fits: bool = False


@dataclass(frozen=True)
class Stored:
    """What became of a new job.

    `claim` is what was known of its key, `row` what was stored, if it was. `is_refused`: `Unless`
    held.
    """

    claim: Claim
    row: JobRow | None
    is_refused: bool


@dataclass(frozen=True)
class Submission:
    """A request for a job, with the first events of the job and the `entry` of the audit log."""

    job: NewJob
    events: Sequence[FirstEvent]
    actor: str
    kept: Kept | None
    entry: dict[str, Any] | None
    unless: Unless

    @property
    def is_queued(self) -> bool:
        """Whether the job is to be in the queue."""
        return self.job.status == Status.QUEUED

    @cached_property
    def texts(self) -> dict[str, str]:
        """The JSON of what is most of it: it is written once, for the statement and the answer."""
        spec = self.job.spec
        return {
            "spec": _json(spec),
            "labels": _json(spec["labels"]),
            "spec_given": _json(self.job.given),
            "recipe_from": _json(self.job.recipe_from),
        }

    @cached_property
    def asked(self) -> str:
        """The JSON of what the statement reads."""
        job, kept, spec = self.job, self.kept, self.job.spec
        rest = {
            "id": job.id,
            "owner": job.owner,
            "key": kept.key if kept is not None else None,
            "lock": kept.lock if kept is not None else None,
            "request_hash": kept.request_hash if kept is not None else None,
            "unless_quotas": self.unless.owner_has_quotas,
            "unless_no_node": self.unless.no_node_fits,
            "engine": job.need.engine,
            "device": job.need.device,
            "ranks": job.need.ranks,
            "name": spec["name"],
            "notes": spec["notes"],
            "priority": spec["priority"],
            "status": job.status.value,
            "need": str(job.need),
            "total_steps": spec["training"]["steps"],
            "traceparent": job.traceparent,
            "version": 1 + len(self.events),
            "sequence": len(self.events),
            "queue_seconds": self._queue_seconds,
            "actor": self.actor,
            "events": [{"seq": n, **vars(e)} for n, e in enumerate(self.events, start=1)],
            "entry": self.entry or {},
        }
        texts = "".join(f',"{name}":{text}' for name, text in self.texts.items())
        return f"{_json(rest)[:-1]}{texts}}}"

    @property
    def _queue_seconds(self) -> float | None:
        seconds: float | None = self.job.spec["limits"]["max_queue_time_seconds"]
        return seconds if self.is_queued else None

    def row(self, created_at: Any, position: int | None, says: str | None, as_of: Any) -> JobRow:
        """What is shown of the job once it is stored."""
        job, spec, texts = self.job, self.job.spec, self.texts
        return JobRow(
            id=job.id,
            name=spec["name"],
            labels=texts["labels"],
            notes=spec["notes"],
            priority=spec["priority"],
            owner=job.owner,
            status=job.status.value,
            total_steps=spec["training"]["steps"],
            version=1 + len(self.events),
            sequence=len(self.events),
            created_at=created_at,
            spec=texts["spec"],
            spec_given=texts["spec_given"],
            recipe_from=texts["recipe_from"],
            max_restarts=str(spec["limits"]["max_restarts"]),
            position=position if self.is_queued else None,
            group_says=says,
            as_of=as_of if self.is_queued else None,
        )


async def store(
    connection: Connection, submissions: Sequence[Submission], crowded: int | None = None
) -> list[Stored]:
    """Store jobs, no two of them under one Idempotency-Key; what became of each, in their order.

    The places of jobs of the priority `crowded`, and of lower ones, are not counted.
    """
    asked = f"[{','.join(submission.asked for submission in submissions)}]"
    values = {"asked": asked, "crowded": crowded}
    found = await (await connection.execute(_STORE, values)).fetchall()
    results = {row[0]: row[1:] for row in found}
    new = [s for s in submissions if s.is_queued and results[s.job.id][4] is not None]
    stored = []
    for submission in submissions:
        is_free, request_hash, target, is_refused, created_at, says, as_of, ahead = results[
            submission.job.id
        ]
        row = None
        if created_at is not None:
            mine, position = _place(submission), None
            if crowded is None or submission.job.spec["priority"] > crowded:
                position = ahead + 1 + sum(1 for other in new if _place(other) < mine)
            if position is not None and position > FARTHEST_POSITION:
                position = None
            row = submission.row(created_at, position, says, as_of)
        stored.append(Stored(Claim(is_free, request_hash, target), row, is_refused))
    return stored


def _place(submission: Submission) -> tuple[int, str]:
    """The order in the queue of what was stored at the same moment."""
    return -submission.job.spec["priority"], submission.job.id


def _json(value: Any) -> str:
    return to_json(value).decode()
