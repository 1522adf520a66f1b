"""What a tick of the scheduler reads and writes: sets, never one job at a time."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.controller.placement import is_readable
from octrain_api.controller.plan import NodeView
from octrain_api.jobs.transitions import Status
from octrain_api.models import Job

log = logging.getLogger("octrain_api.scheduler")

# The distinct needs by skips along the index: as many steps as needs, however many jobs queue.
_NEEDS = text(
    """
    WITH RECURSIVE needs AS (
        (SELECT need FROM jobs WHERE status = 'queued' ORDER BY need LIMIT 1)
        UNION ALL
        SELECT (
            SELECT j.need FROM jobs j WHERE j.status = 'queued' AND j.need > needs.need
            ORDER BY j.need LIMIT 1
        )
        FROM needs WHERE needs.need IS NOT NULL
    )
    SELECT need FROM needs WHERE need IS NOT NULL
    """
)
_HEADS = text(
    """
    SELECT json_agg(json_build_array(
        h.id, h.need, h.priority, CAST(extract(epoch FROM h.created_at) * 1000000 AS bigint),
        h.avoid_nodes, extract(epoch FROM now() - h.created_at), h.owner))
    FROM json_each_text(CAST(:sizes AS json)) AS wanted(need, size)
    CROSS JOIN LATERAL (
        SELECT j.id, j.need, j.priority, j.created_at, j.avoid_nodes, j.owner FROM jobs j
        WHERE j.status = 'queued' AND j.need = wanted.need AND j.owner <> ALL(CAST(:full AS text[]))
          AND j.id <> ALL(CAST(:passed_over AS text[]))
          AND (j.next_attempt_at IS NULL OR j.next_attempt_at <= now())
        ORDER BY j.priority DESC, j.created_at, j.id
        LIMIT CAST(wanted.size AS int)
    ) AS h
    """
)
# As one JSON value: a thousand rows one by one cost the driver more than the database.
# What of nodes changes from tick to tick, and what live attempts hold of them. By name as bytes: in
# the order of a language it takes longer to sort them than to read them.
_STATES = text(
    """
    SELECT json_agg(json_build_array(
        n.id, CAST(extract(epoch FROM n.described_at) * 1000000 AS bigint),
        CASE WHEN n.last_heartbeat_at <= now() - make_interval(secs => :ttl) THEN 1
             WHEN n.wanted <> 'run' THEN 2
             WHEN n.quarantined_since IS NOT NULL THEN 3 ELSE 0 END,
        coalesce(used.cpu, 0), coalesce(used.gpus, 0)) ORDER BY n.name COLLATE "C")
    FROM nodes n LEFT JOIN (
        SELECT node_id, sum(cpu_slots) AS cpu, sum(cardinality(gpu_indices)) AS gpus
        FROM attempts WHERE status <> 'ended' GROUP BY node_id
    ) AS used ON used.node_id = n.id
    """
)
_DESCRIBE = text(
    """
    SELECT json_agg(json_build_array(
        id, name, device_kinds, cpu_slots, gpus, engines, private_roots,
        CAST(extract(epoch FROM described_at) * 1000000 AS bigint)) ORDER BY name COLLATE "C")
    FROM nodes WHERE id IN (SELECT json_array_elements_text(CAST(:ids AS json)))
    """
)
_WRITE_GROUPS = text(
    """
    WITH said AS (
        SELECT key AS need, value AS waiting_for FROM json_each_text(CAST(:texts AS json))
    ), gone AS (
        DELETE FROM queue_groups g WHERE NOT EXISTS (SELECT FROM said WHERE said.need = g.need)
    )
    INSERT INTO queue_groups (need, waiting_for, as_of) SELECT need, waiting_for, now() FROM said
    ON CONFLICT (need) DO UPDATE SET waiting_for = excluded.waiting_for, as_of = excluded.as_of
    """
)

OPEN, SILENT, DRAINING, QUARANTINED = range(4)


class Waiting(NamedTuple):
    """A queued job that may be placed now: since when, in microseconds, and for how many seconds
    it has existed."""

    id: str
    need: str
    priority: int
    created: int
    avoid_nodes: list[str]
    waited: float
    owner: str


class NodeState(NamedTuple):
    """What of a node changes from tick to tick."""

    id: str
    described: int
    state: int
    cpu_used: int
    gpus_used: int


def _readable(node: NodeView) -> NodeView:
    """The node, or one that can do nothing where its row is damaged."""
    if is_readable(node):
        return node
    log.error("the registration of node %s cannot be read; it gets no jobs", node.name)
    nothing: dict[str, Any] = {"device_kinds": [], "cpu_slots": 0, "gpus": [], "engines": {}}
    return replace(node, readable=False, **nothing)


class QueueRepository:
    """The queue, the nodes and their use, for the scheduler."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def needs(self) -> list[str]:
        """The different needs of the queued jobs."""
        return list((await self._session.scalars(_NEEDS)).all())

    async def heads(
        self,
        sizes: Mapping[str, int],
        full: Collection[str] = (),
        passed_over: Collection[str] = (),
    ) -> list[Waiting]:
        """Of each need so many jobs at most, all together by priority, then age.

        The jobs of the owners in `full` are passed over, as no more of them may run now, and those
        named.
        """
        values = {
            "sizes": json.dumps(sizes),
            "full": sorted(full),
            "passed_over": sorted(passed_over),
        }
        found = await self._session.scalar(_HEADS, values)
        rows = [Waiting(*row) for row in found or []]
        return sorted(rows, key=lambda row: (-row.priority, row.created, row.id))

    async def of_need(self, need: str, most: int) -> Sequence[str]:
        """The oldest queued jobs of this need, as it is stored."""
        statement = (
            select(Job.id)
            .where(Job.status == Status.QUEUED.value, Job.need == need)
            .order_by(Job.created_at, Job.id)
            .limit(most)
        )
        return (await self._session.scalars(statement)).all()

    async def node_states(self, heartbeat_ttl: int) -> list[NodeState]:
        """Every registered node, by name: whether it is open, and what of it is used."""
        found = await self._session.scalar(_STATES, {"ttl": heartbeat_ttl})
        return [NodeState(*row) for row in found or []]

    async def describe(self, node_ids: Sequence[str]) -> list[NodeView]:
        """What these nodes said of themselves."""
        found = await self._session.scalar(_DESCRIBE, {"ids": json.dumps(node_ids)})
        return [_readable(NodeView(*row)) for row in found or []]

    async def write_groups(self, texts: Mapping[str, str]) -> None:
        """Say what the jobs of each need wait for, as of now; forget all other needs."""
        await self._session.execute(_WRITE_GROUPS, {"texts": json.dumps(texts)})
