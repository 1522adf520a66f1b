"""Nodes in the database."""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import Row, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now, lock_name, seconds
from octrain_api.models import Attempt, Node, Outbox


class NodeRepository:
    """Reads, writes and locks nodes."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def get(self, node_id: str) -> Node | None:
        """The node with this id."""
        return await self._session.get(Node, node_id)

    async def claim_name(self, name: str) -> Node | None:
        """The node with this name, not locked; until the commit nobody else registers under it."""
        await lock_name(self._session, f"node {name}")
        return (await self._session.scalars(select(Node).where(Node.name == name))).one_or_none()

    async def lock(self, node_id: str) -> Node | None:
        """The node with this id, locked: whoever places attempts on it holds this."""
        statement = (
            select(Node)
            .where(Node.id == node_id)
            .with_for_update()
            .execution_options(populate_existing=True)
        )
        return (await self._session.scalars(statement)).one_or_none()

    async def add(self, node: Node) -> None:
        """Store a new node."""
        self._session.add(node)
        await self._session.flush()

    async def described(self, node: Node) -> None:
        """What is known of the node is new."""
        node.described_at = await database_now(self._session)
        await self._session.flush()

    async def heard(self, node: Node) -> None:
        """The node is heard now."""
        node.last_heartbeat_at = await database_now(self._session)
        node.unreachable_since = None
        await self._session.flush()

    async def left(self, node: Node, heartbeat_ttl: int) -> None:
        """The node says that it goes: it is as one that was not heard for `heartbeat_ttl`."""
        now = await database_now(self._session)
        node.last_heartbeat_at = now - timedelta(seconds=heartbeat_ttl)
        await self._session.flush()

    async def all_with_liveness(self, heartbeat_ttl: int) -> Sequence[Row[Node, bool]]:
        """Every node, by name, and whether it was heard within `heartbeat_ttl` seconds."""
        live = Node.last_heartbeat_at > func.now() - seconds(heartbeat_ttl)
        statement = select(Node, live).order_by(Node.name)
        statement = statement.execution_options(populate_existing=True)
        return (await self._session.execute(statement)).all()

    async def live_attempts(self) -> Sequence[Attempt]:
        """Every attempt that holds a slot somewhere."""
        statement = select(Attempt).where(Attempt.status != "ended")
        statement = statement.execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).all()

    async def live_attempts_on(self, node_id: str) -> Sequence[Row[str, str]]:
        """(job id, attempt id) of every attempt that holds a slot of this node."""
        statement = select(Attempt.job_id, Attempt.id).where(
            Attempt.node_id == node_id, Attempt.status != "ended"
        )
        return (await self._session.execute(statement)).all()

    async def lock_attempts(self, attempt_ids: Sequence[str]) -> None:
        """Lock these attempts in the order of their ids; their jobs are locked already."""
        statement = select(Attempt.id).where(Attempt.id.in_(attempt_ids))
        await self._session.execute(statement.order_by(Attempt.id).with_for_update())

    async def expire_leases(self, node_id: str) -> None:
        """The machine has booted anew: nothing that was claimed there runs any more."""
        # Locked in the order in which the extension of all leases locks them.
        running = (
            select(Attempt.id)
            .where(Attempt.node_id == node_id, Attempt.status == "running")
            .order_by(Attempt.id)
            .with_for_update()
        )
        await self._session.execute(
            update(Attempt)
            .where(Attempt.id.in_(running))
            .values(lease_expires_at=func.now() - seconds(86_400))
        )

    async def jobs_of_newest_faults(
        self, node_id: str, window: int, faults: Sequence[str]
    ) -> list[str]:
        """The jobs of the node's newest attempts, as far back as each ended by one of `faults`.

        Of attempts that ran at one time only one counts: a machine that goes down takes them all.
        Attempts that were never claimed, or that an outage of the API ended, say nothing; nor do
        those that ended more than `window` seconds ago, or before the node was last released.
        """
        recent = (
            select(Attempt.job_id, Attempt.reason, Attempt.claimed_at, Attempt.ended_at)
            .join(Node, Node.id == Attempt.node_id)
            .where(Attempt.node_id == node_id, Attempt.status == "ended")
            .where(Attempt.claimed_at.is_not(None), Attempt.outage_at.is_(None))
            .where(Attempt.ended_at > func.now() - seconds(window))
            .where(Node.faults_from.is_(None) | (Attempt.ended_at > Node.faults_from))
            .order_by(Attempt.ended_at.desc(), Attempt.id.desc())
            .limit(1000)
        )
        jobs: list[str] = []
        began = None
        for row in await self._session.execute(recent):
            if row.reason not in faults:
                break
            if row.job_id not in jobs and (began is None or row.ended_at <= began):
                jobs.append(row.job_id)
                began = row.claimed_at
        return jobs

    async def set_aside(self, node: Node, detail: str) -> None:
        """Place nothing more on a locked node, until it is released."""
        node.quarantined_since = await database_now(self._session)
        node.quarantine_detail = detail
        await self._session.flush()

    async def release(self, node: Node) -> None:
        """Take a locked node back; the faults so far are forgotten."""
        node.quarantined_since = node.quarantine_detail = None
        node.faults_from = await database_now(self._session)
        await self._session.flush()

    async def send_messages_again(self, queue: str) -> None:
        """Have the relay send every unclaimed message of this queue anew."""
        # In the order in which the relay locks those that it has sent.
        rows = (
            select(Outbox.attempt_id)
            .where(Outbox.queue == queue)
            .order_by(Outbox.attempt_id)
            .with_for_update()
        )
        await self._session.execute(
            update(Outbox).where(Outbox.attempt_id.in_(rows)).values(sent_at=None, sendings=0)
        )

    async def mark_unreachable(self, heartbeat_ttl: int) -> None:
        """Note the nodes that were not heard for `heartbeat_ttl` seconds."""
        # Locked in the order of ids, as by whoever places attempts on several.
        silent = (
            select(Node.id)
            .where(Node.unreachable_since.is_(None))
            .where(Node.last_heartbeat_at <= func.now() - seconds(heartbeat_ttl))
            .order_by(Node.id)
            .with_for_update()
        )
        await self._session.execute(
            update(Node).where(Node.id.in_(silent)).values(unreachable_since=Node.last_heartbeat_at)
        )
