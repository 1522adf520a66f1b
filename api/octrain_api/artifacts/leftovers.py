"""What is left over in artifact stores: pruned checkpoints, and what was never registered.

A store belongs to the nodes: only they write to it, and of a private one only its node can. So the
API remembers what is to go, tells it in the answers to node heartbeats, and forgets it when a node
says that it is gone. What is to go is a folder *but for* the files of artifacts that are registered
below it when the node asks; so an order that is carried out late, twice, or after a crash in
between removes nothing that anybody can resume from, and nothing is left for ever.
"""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import delete, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now
from octrain_api.ids import new_id
from octrain_api.models import Artifact, Leftover, Node

# A checkpoint that is no longer kept may be being read: as another job's model, or a download.
PRUNED_AFTER = timedelta(minutes=1)
# A supervisor that lost its attempt may for a while not know it, and still be uploading.
ENDED_AFTER = timedelta(hours=1)
# Told with one heartbeat; the rest with the next.
_AT_A_TIME = 10


class LeftoverRepository:
    """Reads and writes what nodes are to remove."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, node: Node, url: str, after: timedelta) -> None:
        """Have `url`, a folder in the node's store, removed once `after` has passed."""
        if not node.artifact_url:
            return
        row = {
            "id": new_id("left"),
            "store": node.artifact_url.rstrip("/"),
            "url": url.rstrip("/"),
            "node_id": node.id if node.private_roots else None,
            "not_before": await database_now(self._session) + after,
        }
        await self._session.execute(insert(Leftover).values(row).on_conflict_do_nothing())

    async def due(self, node: Node) -> Sequence[Leftover]:
        """What this node can remove now."""
        if not node.artifact_url:
            return []
        statement = (
            select(Leftover)
            .where(Leftover.store == node.artifact_url.rstrip("/"))
            .where(Leftover.not_before <= await database_now(self._session))
            .where(or_(Leftover.node_id.is_(None), Leftover.node_id == node.id))
            .order_by(Leftover.not_before, Leftover.id)
            .limit(_AT_A_TIME)
        )
        return (await self._session.scalars(statement)).all()

    async def removed(self, node: Node, ids: Sequence[str]) -> None:
        """The node has removed these from its store."""
        if not ids or not node.artifact_url:
            return
        await self._session.execute(
            delete(Leftover).where(
                Leftover.id.in_(ids), Leftover.store == node.artifact_url.rstrip("/")
            )
        )

    async def kept_below(self, url: str) -> list[str]:
        """The paths, relative to `url`, of all files there that belong to registered artifacts."""
        base = url.rstrip("/") + "/"
        job_id = base.partition("/jobs/")[2].partition("/")[0]
        kept = []
        statement = select(Artifact).where(Artifact.job_id == job_id)
        for artifact in await self._session.scalars(statement):
            folder = artifact.url.rstrip("/")
            # What a folder brings no manifest of its own for has one beside it.
            files = [f"{folder}.manifest.json"]
            files += [f"{folder}/{file['path']}" for file in artifact.files]
            kept += [file.removeprefix(base) for file in files if file.startswith(base)]
        return sorted(kept)
