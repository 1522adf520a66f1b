"""A new job in the database, in one statement: itself, its first events, its Idempotency-Key, its
entry in the audit log.

A statement is a transaction, so a job that needs nothing else asked beforehand costs one round trip
and one wait for the disk. It takes no NOTIFY with it: Postgres commits transactions that notify one
after the other, each with a wait for the disk of its own. Nobody can wait for a job that is not
there yet; the scheduler and the streams of all jobs are told after the commit, and would find it by
themselves a little later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from octrain_api.controller.placement import Need
from octrain_api.direct import Connection
from octrain_api.idempotency.once import Kept
from octrain_api.idempotency.repository import Claim
from octrain_api.jobs.repository import FARTHEST_POSITION
from octrain_api.jobs.rows import OF_OWNER, JobRow
from octrain_api.jobs.transitions import Status

# The key's parts are those of `IdempotencyRepository`, but that nothing is made where another
# request's row is there already, seen or not. `unfit` is `controller.placement.never_fits`.
_STORE = """
    WITH claim AS MATERIALIZED (
        SELECT CASE WHEN %(key)s::text IS NULL THEN true
               ELSE pg_try_advisory_xact_lock(hashtextextended(%(lock)s, 0)) END AS is_free
    ), earlier AS MATERIALIZED (
        SELECT request_hash, target FROM idempotency_keys
        WHERE owner = %(owner)s AND key = %(key)s AND created_at > now() - interval '24 hours'
    ), limited AS MATERIALIZED (
        SELECT 1 FROM owner_quotas
        WHERE %(unless_quotas)s::boolean AND owner = %(owner)s
          AND (queued IS NOT NULL OR gpu_hours IS NOT NULL)
    ), unfit AS MATERIALIZED (
        SELECT 1
        WHERE %(unless_no_node)s::boolean AND EXISTS (SELECT FROM nodes)
          AND NOT EXISTS (
            SELECT FROM nodes
            WHERE engines -> %(engine)s::text ->> 'ok' = 'true' AND (
                %(device)s::text IN ('cuda', 'auto') AND 'cuda' = ANY (device_kinds)
                AND jsonb_array_length(gpus) >= %(ranks)s::int
                OR %(device)s::text IN ('cpu', 'auto') AND 'cpu' = ANY (device_kinds)
                AND cpu_slots >= greatest(%(ranks)s::int, 1)))
    ), judged AS MATERIALIZED (
        SELECT claim.is_free, earlier.request_hash, earlier.target,
               EXISTS (SELECT FROM limited) OR EXISTS (SELECT FROM unfit) AS is_refused
        FROM claim LEFT JOIN earlier ON true
    ), kept AS (
        INSERT INTO idempotency_keys AS k (owner, key, request_hash, target)
        SELECT %(owner)s, %(key)s::text, %(request_hash)s::text, %(id)s FROM judged
        WHERE %(key)s::text IS NOT NULL AND is_free AND target IS NULL AND NOT is_refused
        ON CONFLICT (owner, key) DO UPDATE SET
            request_hash = excluded.request_hash, target = excluded.target, created_at = now()
        WHERE k.created_at <= now() - interval '24 hours'
        RETURNING 1
    ), ahead AS MATERIALIZED (
        SELECT count(*) AS jobs FROM (
            SELECT 1 FROM jobs
            WHERE status = 'queued' AND priority >= %(priority)s::int
            LIMIT %(farthest)s) AS first
    ), new AS (
        INSERT INTO jobs (id, owner, name, labels, notes, priority, spec, spec_given, recipe_from,
                          status, need, total_steps, traceparent, version, sequence,
                          queue_deadline_at)
        SELECT j.id, j.owner, j.name, j.labels, j.notes, j.priority, j.spec, j.spec_given,
               j.recipe_from, j.status, j.need, j.total_steps, j.traceparent, j.version, j.sequence,
               now() + %(queue_seconds)s::float8 * interval '1 second'
        FROM judged, jsonb_populate_record(CAST(NULL AS jobs), %(job)s::jsonb) AS j
        WHERE NOT is_refused AND (%(key)s::text IS NULL OR EXISTS (SELECT FROM kept))
        RETURNING id, need, created_at
    ), told AS (
        INSERT INTO events (job_id, seq, kind, actor, message, data)
        SELECT new.id, e.seq, e.kind, %(actor)s, e.message, e.data
        FROM new, jsonb_to_recordset(%(events)s::jsonb)
            AS e(seq bigint, kind text, message text, data jsonb)
    ), audited AS (
        INSERT INTO audit_log (key_id, owner, address, request_id, method, route, target, status,
                               outcome)
        SELECT a.key_id, a.owner, a.address, a.request_id, a.method, a.route, new.id, a.status,
               a.outcome
        FROM new, jsonb_populate_record(CAST(NULL AS audit_log), %(entry)s::jsonb) AS a
        WHERE a.key_id IS NOT NULL
    )
    SELECT judged.is_free, judged.request_hash, judged.target, judged.is_refused,
           new.created_at, ahead.jobs AS ahead, said.waiting_for, said.as_of
    FROM judged CROSS JOIN ahead LEFT JOIN new ON true LEFT JOIN LATERAL (
        SELECT waiting_for, as_of FROM queue_groups g WHERE g.need IN (%(of_owner)s, new.need)
        ORDER BY g.need = %(of_owner)s DESC LIMIT 1) AS said ON true
"""


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


async def store(
    connection: Connection,
    job: NewJob,
    events: Sequence[FirstEvent],
    actor: str,
    kept: Kept | None,
    entry: dict[str, Any] | None,
    unless: Unless,
) -> Stored:
    """Store a job with its events and the `entry` of the audit log."""
    spec, limits = job.spec, job.spec["limits"]
    is_queued = job.status == Status.QUEUED
    texts = {name: _json(spec[name]) for name in ("labels", "notes", "name")}
    texts |= {"spec": _json(spec), "recipe_from": _json(job.recipe_from)}
    # A member that is left out is NULL in the row, and not the null of JSON.
    texts |= {"spec_given": _json(job.given)} if job.given is not None else {}
    rest = {
        "id": job.id,
        "owner": job.owner,
        "priority": spec["priority"],
        "status": job.status.value,
        "need": str(job.need),
        "total_steps": spec["training"]["steps"],
        "traceparent": job.traceparent,
        "sequence": len(events),
        "version": 1 + len(events),
    }
    # The spec is most of it, and is written once for the statement and for the answer.
    members = [f'"{name}":{text}' for name, text in texts.items()]
    values = {
        "owner": job.owner,
        "id": job.id,
        "key": kept.key if kept is not None else None,
        "lock": kept.lock if kept is not None else "",
        "request_hash": kept.request_hash if kept is not None else None,
        "unless_quotas": unless.owner_has_quotas,
        "unless_no_node": unless.no_node_fits,
        "engine": job.need.engine,
        "device": job.need.device,
        "ranks": job.need.ranks,
        "priority": spec["priority"],
        "farthest": FARTHEST_POSITION,
        "queue_seconds": limits["max_queue_time_seconds"] if is_queued else None,
        "job": f"{_json(rest)[:-1]},{','.join(members)}}}",
        "actor": actor,
        "events": _json([{"seq": n, **vars(e)} for n, e in enumerate(events, start=1)]),
        "entry": _json(entry or {}),
        "of_owner": OF_OWNER + job.owner,
    }
    found = await (await connection.execute(_STORE, values)).fetchone()
    assert found is not None
    is_free, request_hash, target, is_refused, created_at, ahead, waiting_for, as_of = found
    row = None
    if created_at is not None:
        row = JobRow(
            id=job.id,
            name=spec["name"],
            labels=texts["labels"],
            notes=spec["notes"],
            priority=spec["priority"],
            owner=job.owner,
            status=job.status.value,
            total_steps=spec["training"]["steps"],
            version=1 + len(events),
            sequence=len(events),
            created_at=created_at,
            spec=texts["spec"],
            spec_given=texts.get("spec_given"),
            recipe_from=texts["recipe_from"],
            max_restarts=str(limits["max_restarts"]),
            position=ahead + 1 if is_queued and ahead < FARTHEST_POSITION else None,
            group_says=waiting_for,
            as_of=as_of if is_queued else None,
        )
    return Stored(Claim(is_free, request_hash, target), row, is_refused)


def _json(value: Any) -> str:
    return to_json(value).decode()
