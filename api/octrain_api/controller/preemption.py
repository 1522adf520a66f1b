"""Room for a job of higher priority, made by pausing jobs of lower priority, where allowed.

A paused job saves, leaves its node and goes back to the queue, at no cost of a restart. Of the
nodes that could serve, the one whose victims have the lowest priority, then are the fewest;
of a node's jobs the lowest and youngest go. Nothing is paused while stops that are already under
way make the room.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Row, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec.outcomes import Reason
from octrain_api.controller.one_by_one import each_by_itself
from octrain_api.controller.placement import Need
from octrain_api.controller.plan import Plan
from octrain_api.controller.queue import Waiting
from octrain_api.database import Database
from octrain_api.events.repository import EventRepository
from octrain_api.jobs import transitions
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.transitions import FINAL, Actor, Status
from octrain_api.models import Attempt, Job

log = logging.getLogger("octrain_api.preemption")

_STOPPING = (Status.PAUSING.value, Status.CANCELLING.value)


async def make_room(
    database: Database, plan: Plan, blocked: Mapping[Need, Waiting]
) -> dict[str, str]:
    """Pause what must give way to the blocked jobs; the node that is emptied for each job."""
    highest = max(job.priority for job in blocked.values())
    async with database.session() as session:
        attempts: defaultdict[str, list[Row[Any]]] = defaultdict(list)
        for row in await _attempts_below(session, highest):
            attempts[row.node_id].append(row)
    emptied: dict[str, str] = {}
    taken: set[str] = set()
    for need, job in sorted(blocked.items(), key=lambda item: -item[1].priority):
        found = _victims(plan, need, job, attempts, taken)
        if found is None:
            continue
        node_id, victims = found
        emptied[job.id] = node_id
        taken |= {victim.attempt_id for victim in victims}
        await each_by_itself(*(partial(_pause, database, row.job_id, job) for row in victims))
    return emptied


async def _attempts_below(session: AsyncSession, priority: int) -> Sequence[Row[Any]]:
    """Claimed attempts of jobs below this priority, and every attempt that is being stopped."""
    statement = (
        select(
            Attempt.node_id,
            Attempt.id.label("attempt_id"),
            Attempt.job_id,
            Attempt.device,
            (func.cardinality(Attempt.gpu_indices) + Attempt.cpu_slots).label("held"),
            Attempt.claimed_at,
            Job.priority,
            Job.status,
        )
        .join(Job, Job.id == Attempt.job_id)
        .where(Attempt.status != "ended")
        .where(
            or_(
                Job.status.in_(_STOPPING),
                and_(Attempt.status == "running", Job.priority < priority),
            )
        )
    )
    return (await session.execute(statement)).all()


def _victims(
    plan: Plan,
    need: Need,
    job: Waiting,
    attempts: Mapping[str, Sequence[Row[Any]]],
    taken: set[str],
) -> tuple[str, list[Row[Any]]] | None:
    """The node to be emptied and whom to pause on it; None when nothing helps, or none is needed.

    A node on which enough is being stopped already comes back with nobody to pause.
    """
    device = plan.device(need)
    wanted = need.ranks
    best: tuple[tuple[int, int, str], str, list[Row[Any]]] | None = None
    for room in plan.capable(need):
        if device == "cuda" and room.held_for not in (None, job.id):
            continue
        here = [row for row in attempts.get(room.node.id, ()) if row.device == device]
        gone = [row for row in here if row.status in _STOPPING or row.attempt_id in taken]
        have = room.gpus_free if device == "cuda" else room.cpu_free
        have += sum(row.held for row in gone)
        if have >= wanted:
            return room.node.id, []
        chosen: list[Row[Any]] = []
        lower = [row for row in here if row not in gone and row.priority < job.priority]
        for row in sorted(lower, key=lambda row: (row.priority, -row.claimed_at.timestamp())):
            if have >= wanted:
                break
            chosen.append(row)
            have += row.held
        if have < wanted:
            continue
        score = (chosen[-1].priority, len(chosen), room.node.name)
        if best is None or score < best[0]:
            best = (score, room.node.id, chosen)
    return (best[1], best[2]) if best is not None else None


async def _pause(database: Database, victim_id: str, job: Waiting) -> None:
    async with database.transaction() as session:
        jobs = JobRepository(session)
        victim = await jobs.lock(victim_id)
        attempt = await jobs.live_attempt(victim_id)
        if victim is None or attempt is None or victim.priority >= job.priority:
            return
        if victim.status not in (Status.STARTING, Status.RUNNING) or attempt.claimed_at is None:
            return
        detail = f"It makes room for {job.id}, whose priority is {job.priority}."
        await transitions.apply(
            session,
            victim,
            Status.PAUSING,
            Actor.SCHEDULER,
            attempt=attempt,
            message=f"Paused for a job of higher priority: {job.id}.",
            reason=Reason.PREEMPTED,
            detail=detail,
            data={"preempted_by": job.id, "priority": job.priority, "node_id": attempt.node_id},
        )
        log.info("paused %s for %s", victim.id, job.id)
    async with database.transaction() as session:
        preemptor = await JobRepository(session).lock(job.id)
        if preemptor is not None and preemptor.status not in FINAL:
            await EventRepository(session).append(
                preemptor,
                kind="preempting",
                actor=Actor.SCHEDULER,
                message=f"Paused {victim_id} to make room for this job.",
                data={"job_id": victim_id, "node_id": attempt.node_id},
            )
