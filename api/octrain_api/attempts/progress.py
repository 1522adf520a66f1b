"""Signs of work, and checkpoints: what a locked attempt changes of its locked job besides."""

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.attempts.repository import AttemptRepository
from octrain_api.controller.placement import Need
from octrain_api.events.repository import EventRepository
from octrain_api.jobs.transitions import Actor
from octrain_api.models import Attempt, Job
from octrain_api.nodes.repository import NodeRepository


async def note_progress(session: AsyncSession, job: Job, attempt: Attempt) -> None:
    """The attempt's step or phase has changed now: it does not stall, or no longer."""
    if await AttemptRepository(session).progressed(attempt):
        await EventRepository(session).append(
            job,
            kind="progressed",
            actor=Actor.SUPERVISOR,
            message="The training goes on.",
            attempt=attempt.number,
            data={"attempt_id": attempt.id, "step": attempt.step, "phase": attempt.phase},
        )


async def follow_checkpoint(session: AsyncSession, job: Job) -> None:
    """Bind the job to the node of its newest good checkpoint, if no other node reaches that."""
    node_id = await AttemptRepository(session).checkpoint_node(job.id)
    node = await NodeRepository(session).get(node_id) if node_id is not None else None
    pinned = node.id if node is not None and node.private_roots else None
    job.need = str(Need.parse(job.need).on(pinned))
