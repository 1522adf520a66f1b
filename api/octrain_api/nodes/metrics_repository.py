"""Samples of nodes, and what is known of the use of each attempt's GPUs."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import seconds
from octrain_api.models import Attempt, GpuActivity, NodeSample


class NodeMetricRepository:
    """Reads and writes samples."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, node_id: str, rows: Sequence[dict[str, Any]]) -> set[str]:
        """Store samples (`id`, `time`, `host`, `gpus`); the ids of those that were new."""
        statement = (
            insert(NodeSample)
            .values([{"node_id": node_id, **row} for row in rows])
            .on_conflict_do_nothing()
            .returning(NodeSample.id)
        )
        return set(await self._session.scalars(statement))

    async def forget(self, node_id: str, older_than: float) -> None:
        """Drop the node's samples of more than so many seconds ago."""
        await self._session.execute(
            delete(NodeSample).where(
                NodeSample.node_id == node_id,
                NodeSample.time < func.now() - seconds(older_than),
            )
        )

    async def of_node(self, node_id: str, since: float) -> Sequence[NodeSample]:
        """The samples of the last `since` seconds, oldest first."""
        statement = (
            select(NodeSample)
            .where(NodeSample.node_id == node_id)
            .where(NodeSample.time >= func.now() - seconds(since))
            .order_by(NodeSample.time, NodeSample.id)
        )
        return (await self._session.scalars(statement)).all()

    async def gpu_attempts(self, node_id: str) -> Sequence[Attempt]:
        """The claimed attempts on the node's GPUs, not locked."""
        statement = (
            select(Attempt)
            .where(Attempt.node_id == node_id, Attempt.status == "running")
            .where(Attempt.device == "cuda")
            .order_by(Attempt.id)
        )
        return (await self._session.scalars(statement)).all()

    async def activity(self, attempt_id: str) -> GpuActivity | None:
        """What is known of the attempt's GPUs, locked."""
        statement = select(GpuActivity).where(GpuActivity.attempt_id == attempt_id)
        statement = statement.with_for_update().execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def note_activity(self, attempt_id: str, seen_at: datetime, busy_at: datetime) -> None:
        """Store until when the GPUs were seen, and when they were last seen at work."""
        values = {"seen_at": seen_at, "busy_at": busy_at}
        await self._session.execute(
            insert(GpuActivity)
            .values(attempt_id=attempt_id, **values)
            .on_conflict_do_update(index_elements=["attempt_id"], set_=values)
        )
