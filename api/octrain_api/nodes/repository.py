"""Nodes in the database."""

from collections.abc import Sequence

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

    async def lock_by_name(self, name: str) -> Node | None:
        """The node with this name, locked; until the commit nobody else can make one either."""
        await lock_name(self._session, f"node {name}")
        statement = select(Node).where(Node.name == name).with_for_update()
        return (await self._session.scalars(statement)).one_or_none()

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

    async def heard(self, node: Node) -> None:
        """The node is heard now."""
        node.last_heartbeat_at = await database_now(self._session)
        node.unreachable_since = None
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

    async def live_attempts_on(self, node_id: str) -> Sequence[Attempt]:
        """Every attempt that holds a slot of this node."""
        statement = (
            select(Attempt)
            .where(Attempt.node_id == node_id, Attempt.status != "ended")
            .execution_options(populate_existing=True)
        )
        return (await self._session.scalars(statement)).all()

    async def expire_leases(self, node_id: str) -> None:
        """The machine has booted anew: nothing that was claimed there runs any more."""
        await self._session.execute(
            update(Attempt)
            .where(Attempt.node_id == node_id, Attempt.status == "running")
            .values(lease_expires_at=func.now() - seconds(86_400))
        )

    async def send_messages_again(self, queue: str) -> None:
        """Have the relay send every unclaimed message of this queue anew."""
        await self._session.execute(
            update(Outbox).where(Outbox.queue == queue).values(sent_at=None, sendings=0)
        )

    async def mark_unreachable(self, heartbeat_ttl: int) -> None:
        """Note the nodes that were not heard for `heartbeat_ttl` seconds."""
        await self._session.execute(
            update(Node)
            .where(Node.unreachable_since.is_(None))
            .where(Node.last_heartbeat_at <= func.now() - seconds(heartbeat_ttl))
            .values(unreachable_since=Node.last_heartbeat_at)
        )
