"""Nodes on which one job after another dies are set aside until an administrator releases them.

A fault is a crash of the trainer, of its GPU or of what connects its ranks, or a lost supervisor.
Faults of one and the same job say more of the job than of the node, and faults at one time are one
fault of the machine; so a row counts only different jobs, one after the other. An attempt that
ended in any other way breaks the row.
"""

import logging

from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec.outcomes import Reason
from octrain_api.events.repository import EventRepository
from octrain_api.listener import notify_queue
from octrain_api.models import Attempt, Job
from octrain_api.nodes.repository import NodeRepository
from octrain_api.settings import SchedulerSettings

log = logging.getLogger("octrain_api.faults")

FAULTS = frozenset(
    {
        Reason.TRAINER_CRASHED,
        Reason.CUDA_ERROR,
        Reason.COMMUNICATION_ERROR,
        Reason.HARDWARE_FAULT,
        Reason.WORKER_LOST,
    }
)


async def note_end(
    session: AsyncSession, settings: SchedulerSettings, job: Job, attempt: Attempt, *, ours: bool
) -> None:
    """Set the node aside if the end of this attempt completes a row of faults.

    The rows of the job and of the attempt are locked, the node's is locked here, last. `ours` says
    that the service itself caused the end.
    """
    if ours or not settings.fault_limit or attempt.reason not in FAULTS:
        return
    nodes = NodeRepository(session)
    jobs = await nodes.jobs_of_newest_faults(
        attempt.node_id, settings.fault_window, [reason.value for reason in FAULTS]
    )
    if len(jobs) < settings.fault_limit:
        return
    node = await nodes.lock(attempt.node_id)
    if node is None or node.quarantined_since is not None:
        return
    detail = (
        f"{len(jobs)} jobs in a row ended there by a crash or a loss, the last one "
        f"({attempt.reason}) in attempt {attempt.number} of {job.id}."
    )
    await nodes.set_aside(node, detail)
    await EventRepository(session).append(
        job,
        kind="node_set_aside",
        actor="service",
        message=f"Node {node.name} is set aside: {detail}",
        attempt=attempt.number,
        data={"node_id": node.id, "node": node.name, "jobs": jobs},
    )
    await notify_queue(session)
    log.error("node %s is set aside: %s", node.name, detail)
