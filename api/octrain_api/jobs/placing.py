"""The edge from queued to starting, for many jobs in one transaction.

It is the table's edge: the same guard (the attempt is made here, together with the status), the
same effects, the same event. The plan was made without locks, so all that it counted on is looked
at again once jobs and nodes are locked: first the jobs, then the nodes, each in the order of ids.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.controller.plan import Choice
from octrain_api.ids import new_id
from octrain_api.jobs.transitions import TABLE, Actor, Status
from octrain_api.listener import JOB_CHANNEL
from octrain_api.nodes.service import queue_of

assert (Status.QUEUED, Status.STARTING, Actor.SCHEDULER) in TABLE

# A job that somebody holds, to cancel it perhaps, is left for the next tick.
_LOCK_JOBS = text(
    """
    SELECT id, need FROM jobs
    WHERE id IN (SELECT json_array_elements_text(CAST(:ids AS json))) AND status = 'queued'
    ORDER BY id FOR UPDATE SKIP LOCKED
    """
)
_LOCK_NODES = text(
    """
    SELECT id, CAST(extract(epoch FROM described_at) * 1000000 AS bigint) AS described FROM nodes
    WHERE id IN (SELECT json_array_elements_text(CAST(:ids AS json)))
      AND wanted = 'run' AND quarantined_since IS NULL
    ORDER BY id FOR NO KEY UPDATE
    """
)
_USED = text(
    """
    SELECT node_id, gpu_indices, cpu_slots FROM attempts
    WHERE node_id IN (SELECT json_array_elements_text(CAST(:ids AS json))) AND status <> 'ended'
    """
)
_PLACE = text(
    """
    WITH p AS MATERIALIZED (
        SELECT * FROM json_to_recordset(CAST(:rows AS json)) AS p(
            job text, attempt text, node text, name text, queue text, device text, gpus text,
            slots int)
    ), moved AS (
        UPDATE jobs j
        SET status = 'starting', reason = NULL, detail = NULL, device = p.device,
            attempt = j.attempt + 1, sequence = j.sequence + 1, version = j.version + 1,
            next_attempt_at = NULL, queue_deadline_at = NULL
        FROM p WHERE j.id = p.job
        RETURNING j.id AS job, j.attempt AS number, j.sequence, j.spec->'limits' AS limits,
                  j.traceparent
    ), placed AS (
        INSERT INTO attempts (id, job_id, number, node_id, status, fencing_token, device,
                              gpu_indices, cpu_slots, lease_seconds, stall_seconds)
        SELECT attempt, job, number, node, 'placed', nextval('fencing_tokens'), device,
               CAST(gpus AS int[]), slots, CAST(limits->>'lease_ttl_seconds' AS int),
               CAST(limits->>'stall_timeout_seconds' AS int)
        FROM p JOIN moved USING (job)
    ), messages AS (
        INSERT INTO outbox (attempt_id, queue, task_id, payload)
        SELECT attempt, queue, job || ':' || number,
               jsonb_strip_nulls(jsonb_build_object(
                   'job_id', job, 'attempt_id', attempt, 'attempt', number,
                   'traceparent', traceparent))
        FROM p JOIN moved USING (job)
    ), told AS (
        INSERT INTO events (job_id, seq, kind, actor, message, attempt, data)
        SELECT job, sequence, 'status', 'scheduler', 'Placed on node ' || name || '.', number,
               jsonb_build_object(
                   'from', 'queued', 'to', 'starting', 'reason', NULL, 'detail', NULL,
                   'attempt_id', attempt, 'node_id', node, 'node', name, 'device', device,
                   'gpu_indices', to_jsonb(CAST(gpus AS int[])))
        FROM p JOIN moved USING (job)
    )
    SELECT job, number, pg_notify(:channel, job) FROM moved
    """
)


@dataclass(frozen=True)
class Placed:
    """A job that has been placed."""

    job_id: str
    number: int
    choice: Choice


async def place_many(session: AsyncSession, choices: Sequence[Choice]) -> list[Placed]:
    """Place those of the choices whose job is still queued and whose node still has the room."""
    fitting = await _still_fitting(session, choices)
    if not fitting:
        return []
    rows = [
        {
            "job": choice.job_id,
            "attempt": new_id("att"),
            "node": choice.node.id,
            "name": choice.node.name,
            "queue": queue_of(choice.node.id),
            "device": choice.device,
            "gpus": "{" + ",".join(map(str, gpus)) + "}",
            "slots": choice.cpu_slots,
        }
        for choice, gpus in fitting
    ]
    parameters = {"rows": json.dumps(rows), "channel": JOB_CHANNEL}
    numbers = {row.job: row.number for row in await session.execute(_PLACE, parameters)}
    return [Placed(choice.job_id, numbers[choice.job_id], choice) for choice, _ in fitting]


async def _still_fitting(
    session: AsyncSession, choices: Sequence[Choice]
) -> list[tuple[Choice, list[int]]]:
    """Lock jobs and nodes; the choices that hold, with the indices of their GPUs."""
    job_ids = {"ids": json.dumps([choice.job_id for choice in choices])}
    needs = {row.id: row.need for row in await session.execute(_LOCK_JOBS, job_ids)}
    choices = [choice for choice in choices if needs.get(choice.job_id) == choice.need]
    ids = {"ids": json.dumps(sorted({choice.node.id for choice in choices}))}
    nodes = {row.id: row.described for row in await session.execute(_LOCK_NODES, ids)}
    cpu_used = dict.fromkeys(nodes, 0)
    gpus_used: dict[str, set[int]] = {node_id: set() for node_id in nodes}
    for row in await session.execute(_USED, ids):
        if row.node_id in nodes:
            cpu_used[row.node_id] += row.cpu_slots
            gpus_used[row.node_id].update(row.gpu_indices)
    fitting: list[tuple[Choice, list[int]]] = []
    for choice in choices:
        node = choice.node
        if nodes.get(node.id) != node.described:
            continue
        indices = sorted(int(gpu["index"]) for gpu in node.gpus)
        free = [index for index in indices if index not in gpus_used[node.id]]
        if choice.device == "cpu":
            if cpu_used[node.id] + choice.cpu_slots <= node.cpu_slots:
                cpu_used[node.id] += choice.cpu_slots
                fitting.append((choice, []))
        elif len(free) >= choice.gpus:
            gpus_used[node.id].update(free[: choice.gpus])
            fitting.append((choice, free[: choice.gpus]))
    return fitting
