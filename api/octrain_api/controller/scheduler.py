"""Queued jobs onto live nodes: each placement is one transaction with its attempt and message."""

import logging

from octrain_api.attempts.repository import AttemptRepository
from octrain_api.controller.placement import Candidate, Placement, choose
from octrain_api.controller.repository import ControllerRepository
from octrain_api.database import Database
from octrain_api.ids import new_id
from octrain_api.jobs import transitions
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.transitions import Actor, Status
from octrain_api.listener import notify_job
from octrain_api.models import Attempt, Node, Outbox
from octrain_api.nodes.repository import NodeRepository
from octrain_api.nodes.service import queue_of
from octrain_api.settings import ControllerSettings

log = logging.getLogger("octrain_api.scheduler")


async def schedule(database: Database, settings: ControllerSettings) -> int:
    """Place what can be placed and say of the rest what it waits for; how many were placed."""
    async with database.session() as session:
        repository = ControllerRepository(session)
        queue = await repository.queue()
        if not queue:
            return 0
        nodes = NodeRepository(session)
        rows = await nodes.all_with_liveness(settings.heartbeat_ttl)
        candidates = _candidates(
            [node for node, live in rows if live and node.wanted == "run"],
            list(await nodes.live_attempts()),
        )
        registered = [node for node, _ in rows]
        pinned = await repository.pinned_nodes([row.id for row in queue if row.attempt > 0])
    placed = 0
    waiting: dict[str, str] = {}
    for row in queue:
        spec = {"resources": row.resources, "recipe": {"engine": row.engine}}
        choice = choose(
            spec,
            list(candidates.values()),
            registered=registered,
            avoid=row.avoid_nodes,
            pinned=pinned.get(row.id),
        )
        if isinstance(choice, Placement):
            if await _place(database, row.id, choice):
                placed += 1
            candidates[choice.node_id].take(choice)
        elif choice != row.waiting_for:
            waiting[row.id] = choice
    if waiting:
        async with database.transaction() as session:
            repository = ControllerRepository(session)
            for job_id, text in sorted(waiting.items()):
                if await repository.set_waiting_for(job_id, text):
                    await notify_job(session, job_id)
    return placed


def _candidates(nodes: list[Node], attempts: list[Attempt]) -> dict[str, Candidate]:
    candidates = {node.id: Candidate(node) for node in nodes}
    for attempt in attempts:
        candidate = candidates.get(attempt.node_id)
        if candidate is not None:
            candidate.take(Placement(attempt.node_id, attempt.device, attempt.gpu_indices))
    return candidates


async def _place(database: Database, job_id: str, placement: Placement) -> bool:
    """Create the attempt, its fencing token and its message, if job and node are still free."""
    async with database.transaction() as session:
        job = await JobRepository(session).lock(job_id)
        node = await NodeRepository(session).lock(placement.node_id)
        if job is None or job.status != Status.QUEUED or node is None:
            return False
        # The plan was made without locks: what it counted on is looked at again.
        taken = await NodeRepository(session).live_attempts_on(node.id)
        now = _candidates([node], list(taken))[node.id]
        free = set(placement.gpu_indices) <= set(now.free_gpus)
        if placement.device == "cpu":
            free = now.cpu_used < node.cpu_slots
        if not free:
            return False
        attempts = AttemptRepository(session)
        job.attempt += 1
        job.device = placement.device
        attempt = Attempt(
            id=new_id("att"),
            job_id=job.id,
            number=job.attempt,
            node_id=node.id,
            status="placed",
            fencing_token=await attempts.next_fencing_token(),
            device=placement.device,
            gpu_indices=placement.gpu_indices,
            lease_seconds=job.spec["limits"]["lease_ttl_seconds"],
        )
        payload = {"job_id": job.id, "attempt_id": attempt.id, "attempt": attempt.number}
        message = Outbox(
            attempt_id=attempt.id,
            queue=queue_of(node.id),
            task_id=f"{job.id}:{attempt.number}",
            payload=payload,
        )
        await attempts.add(attempt, message)
        await transitions.apply(
            session,
            job,
            Status.STARTING,
            Actor.SCHEDULER,
            attempt=attempt,
            message=f"Placed on node {node.name}.",
            data={
                "attempt_id": attempt.id,
                "node_id": node.id,
                "node": node.name,
                "device": placement.device,
                "gpu_indices": placement.gpu_indices,
            },
        )
        log.info("placed %s attempt %d on %s", job.id, attempt.number, node.name)
    return True
