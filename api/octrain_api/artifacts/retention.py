"""Which of a job's checkpoints stay registered: the newest, and the best, over all its attempts.

A trainer knows only the checkpoints of its own attempt, so the choice is made here, in the
transaction that registers a new one: there is no moment in which fewer than `keep_last` are
registered, and none in which a registered one has lost its files. The files go later; see
`leftovers`. Checkpoints found damaged count for nothing and are left as they are, for whoever wants
to know what happened to them.
"""

import math
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.artifacts.leftovers import PRUNED_AFTER, LeftoverRepository
from octrain_api.events.repository import EventRepository
from octrain_api.jobs.transitions import Actor
from octrain_api.models import Artifact, Attempt, Job, Node


async def prune_checkpoints(session: AsyncSession, job: Job) -> None:
    """Unregister what the locked job's spec does not keep, and have its files removed."""
    statement = (
        select(Artifact)
        .where(Artifact.job_id == job.id, Artifact.kind == "checkpoint")
        .where(Artifact.step.is_not(None), ~Artifact.damaged)
        .order_by(Artifact.step.desc(), Artifact.attempt.desc(), Artifact.created_at.desc())
    )
    found = (await session.scalars(statement)).all()
    kept = _kept(found, job.spec.get("checkpoint") or {})
    leftovers = LeftoverRepository(session)
    for artifact in found:
        if artifact.id in kept:
            continue
        attempt = await session.get(Attempt, artifact.attempt_id)
        node = await session.get(Node, attempt.node_id) if attempt is not None else None
        if node is not None:
            await leftovers.add(node, artifact.url, PRUNED_AFTER)
        await session.delete(artifact)
        await EventRepository(session).append(
            job,
            kind="artifact_removed",
            actor=Actor.SUPERVISOR,
            message=f"Checkpoint {artifact.name!r} is no longer kept.",
            attempt=artifact.attempt,
            data={"artifact_id": artifact.id, "name": artifact.name, "step": artifact.step},
        )
    await session.flush()


def _kept(found: Sequence[Artifact], keep: dict[str, Any]) -> set[str]:
    """The ids of those to keep, of checkpoints given newest first."""
    # A step that a later attempt repeated is the later attempt's.
    by_step: dict[int, Artifact] = {}
    for artifact in found:
        if artifact.step is not None:
            by_step.setdefault(artifact.step, artifact)
    distinct = list(by_step.values())
    measured = [one for one in distinct if one.metric is not None and math.isfinite(one.metric)]
    best = sorted(measured, key=lambda one: (one.metric, one.step))
    newest = distinct[: int(keep.get("keep_last", 1))]
    return {one.id for one in [*newest, *best[: int(keep.get("keep_best", 0))]]}
