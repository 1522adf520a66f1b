"""A new job in the database, in one statement: itself, its first events, its Idempotency-Key, its
entry in the audit log.

A statement is a transaction, so a job that needs nothing else asked beforehand costs one round trip
and one wait for the disk. It takes no NOTIFY with it: Postgres commits transactions that notify one
after the other, each with a wait for the disk of its own. Nobody can wait for a job that is not
there yet; the scheduler and the streams of all jobs are told after the commit, and would find it by
themselves a little later.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from octrain_api.controller.placement import Need
from octrain_api.idempotency.once import Kept
from octrain_api.idempotency.repository import Claim
from octrain_api.jobs import limits
from octrain_api.jobs.repository import FARTHEST_POSITION
from octrain_api.jobs.transitions import Status
from octrain_api.jobs.views import OF_OWNER, THE_SCHEDULER, Wait
from octrain_api.models import Job

# The key's parts are those of `IdempotencyRepository`, but that nothing is made where another
# request's row is there already, seen or not. `unfit` is `controller.placement.never_fits`.
_STORE = text(
    """
    WITH claim AS MATERIALIZED (
        SELECT CASE WHEN CAST(:key AS text) IS NULL THEN true
               ELSE pg_try_advisory_xact_lock(hashtextextended(:lock, 0)) END AS is_free
    ), earlier AS MATERIALIZED (
        SELECT request_hash, target FROM idempotency_keys
        WHERE owner = :owner AND key = :key AND created_at > now() - interval '24 hours'
    ), limited AS MATERIALIZED (
        SELECT 1 FROM owner_quotas
        WHERE CAST(:unless_quotas AS boolean) AND owner = :owner
          AND (queued IS NOT NULL OR gpu_hours IS NOT NULL)
    ), unfit AS MATERIALIZED (
        SELECT 1
        WHERE CAST(:unless_no_node AS boolean) AND EXISTS (SELECT FROM nodes)
          AND NOT EXISTS (
            SELECT FROM nodes
            WHERE engines -> CAST(:engine AS text) ->> 'ok' = 'true' AND (
                CAST(:device AS text) IN ('cuda', 'auto') AND 'cuda' = ANY (device_kinds)
                AND jsonb_array_length(gpus) >= CAST(:ranks AS int)
                OR CAST(:device AS text) IN ('cpu', 'auto') AND 'cpu' = ANY (device_kinds)
                AND cpu_slots >= greatest(CAST(:ranks AS int), 1)))
    ), judged AS MATERIALIZED (
        SELECT claim.is_free, earlier.request_hash, earlier.target,
               EXISTS (SELECT FROM limited) OR EXISTS (SELECT FROM unfit) AS is_refused
        FROM claim LEFT JOIN earlier ON true
    ), kept AS (
        INSERT INTO idempotency_keys AS k (owner, key, request_hash, target)
        SELECT :owner, CAST(:key AS text), CAST(:request_hash AS text), :id FROM judged
        WHERE CAST(:key AS text) IS NOT NULL AND is_free AND target IS NULL AND NOT is_refused
        ON CONFLICT (owner, key) DO UPDATE SET
            request_hash = excluded.request_hash, target = excluded.target, created_at = now()
        WHERE k.created_at <= now() - interval '24 hours'
        RETURNING 1
    ), ahead AS MATERIALIZED (
        SELECT count(*) AS jobs FROM (
            SELECT 1 FROM jobs
            WHERE status = 'queued' AND priority >= CAST(:priority AS int)
            LIMIT :farthest) AS first
    ), new AS (
        INSERT INTO jobs (id, owner, name, labels, notes, priority, spec, recipe_from, status, need,
                          total_steps, traceparent, version, sequence, queue_deadline_at)
        SELECT j.id, j.owner, j.name, j.labels, j.notes, j.priority, j.spec, j.recipe_from,
               j.status, j.need, j.total_steps, j.traceparent, j.version, j.sequence,
               now() + CAST(:queue_seconds AS float8) * interval '1 second'
        FROM judged, jsonb_populate_record(CAST(NULL AS jobs), CAST(:job AS jsonb)) AS j
        WHERE NOT is_refused AND (CAST(:key AS text) IS NULL OR EXISTS (SELECT FROM kept))
        RETURNING id, need, created_at
    ), told AS (
        INSERT INTO events (job_id, seq, kind, actor, message, data)
        SELECT new.id, e.seq, e.kind, :actor, e.message, e.data
        FROM new, jsonb_to_recordset(CAST(:events AS jsonb))
            AS e(seq bigint, kind text, message text, data jsonb)
    ), audited AS (
        INSERT INTO audit_log (key_id, owner, address, request_id, method, route, target, status,
                               outcome)
        SELECT a.key_id, a.owner, a.address, a.request_id, a.method, a.route, new.id, a.status,
               a.outcome
        FROM new, jsonb_populate_record(CAST(NULL AS audit_log), CAST(:entry AS jsonb)) AS a
        WHERE a.key_id IS NOT NULL
    )
    SELECT judged.is_free, judged.request_hash, judged.target, judged.is_refused,
           new.created_at, ahead.jobs AS ahead, said.waiting_for, said.as_of
    FROM judged CROSS JOIN ahead LEFT JOIN new ON true LEFT JOIN LATERAL (
        SELECT waiting_for, as_of FROM queue_groups g WHERE g.need IN (:of_owner, new.need)
        ORDER BY g.need = :of_owner DESC LIMIT 1) AS said ON true
    """
)
_COLUMNS = (
    *("id", "owner", "name", "labels", "notes", "priority", "spec", "recipe_from", "status"),
    *("need", "total_steps", "traceparent", "version", "sequence"),
)


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

    `claim` is what was known of its key. `is_new` says whether it was stored: it has its times and
    numbers then, and `wait` says what it waits for if it is queued. `is_refused`: `Unless` held.
    """

    claim: Claim
    is_new: bool
    is_refused: bool
    wait: Wait | None


async def store(
    database: AsyncSession | AsyncConnection,
    job: Job,
    events: Sequence[FirstEvent],
    actor: str,
    kept: Kept | None,
    entry: dict[str, Any] | None,
    unless: Unless,
) -> Stored:
    """Store a job that no session knows, with its events and the `entry` of the audit log."""
    need = Need.parse(job.need)
    job.sequence = len(events)
    job.version = 1 + len(events)
    is_queued = job.status == Status.QUEUED
    values = {
        "owner": job.owner,
        "id": job.id,
        "key": kept.key if kept is not None else None,
        "lock": kept.lock if kept is not None else "",
        "request_hash": kept.request_hash if kept is not None else None,
        "unless_quotas": unless.owner_has_quotas,
        "unless_no_node": unless.no_node_fits,
        "engine": need.engine,
        "device": need.device,
        "ranks": need.ranks,
        "priority": job.priority,
        "farthest": FARTHEST_POSITION,
        "queue_seconds": limits.max_queue_time(job) if is_queued else None,
        "job": json.dumps({name: getattr(job, name) for name in _COLUMNS}),
        "actor": actor,
        "events": json.dumps([{"seq": n, **vars(e)} for n, e in enumerate(events, start=1)]),
        "entry": json.dumps(entry or {}),
        "of_owner": OF_OWNER + job.owner,
    }
    row = (await database.execute(_STORE, values)).one()
    claim = Claim(row.is_free, row.request_hash, row.target)
    is_new = row.created_at is not None
    wait = None
    if is_new:
        job.created_at = row.created_at
        if is_queued:
            position = row.ahead + 1 if row.ahead < FARTHEST_POSITION else None
            wait = Wait(row.waiting_for or THE_SCHEDULER, row.as_of, position)
    return Stored(claim, is_new, row.is_refused, wait)
