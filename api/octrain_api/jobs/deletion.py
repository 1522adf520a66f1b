"""What a deleted job leaves behind, and what not."""

from datetime import timedelta

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.artifacts.leftovers import LeftoverRepository
from octrain_api.attempts.repository import artifact_prefix
from octrain_api.database import database_now
from octrain_api.models import Artifact, Attempt, Job, LogChunk, MetricLayout
from octrain_api.nodes.repository import NodeRepository


async def remove_contents(session: AsyncSession, job: Job, store_after: timedelta) -> None:
    """Remove metrics, logs, artifacts and the spec of a locked job that has ended.

    Its row, its attempts and its events stay. Files in stores are removed by nodes that reach
    them, `store_after` from now.
    """
    # Series, blocks and rollups go with their layouts.
    await session.execute(delete(MetricLayout).where(MetricLayout.job_id == job.id))
    await session.execute(delete(LogChunk).where(LogChunk.job_id == job.id))
    await session.execute(delete(Artifact).where(Artifact.job_id == job.id))
    leftovers, nodes = LeftoverRepository(session), NodeRepository(session)
    statement = select(Attempt).where(Attempt.job_id == job.id).order_by(Attempt.number)
    for attempt in await session.scalars(statement):
        node = await nodes.get(attempt.node_id)
        if node is not None and node.artifact_url:
            url = f"{node.artifact_url.rstrip('/')}/{artifact_prefix(attempt)}"
            await leftovers.add(node, url, store_after)
    job.deleted_at = await database_now(session)
    job.spec, job.spec_given, job.latest_metrics = {}, None, {}
    job.labels, job.notes = {}, ""
    job.log_lines = 0
    await session.flush()
