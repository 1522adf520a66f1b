"""Registration and heartbeats of nodes, and the list of them."""

from collections import defaultdict

from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec.outcomes import Reason
from octrain_api.artifacts.leftovers import LeftoverRepository
from octrain_api.attempts.repository import AttemptRepository
from octrain_api.controller.placement import is_readable
from octrain_api.ids import new_id
from octrain_api.jobs import transitions
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.transitions import Actor, Status
from octrain_api.keys.principal import Principal
from octrain_api.keys.service import KeyService
from octrain_api.listener import notify_queue
from octrain_api.models import Attempt, Job, Node
from octrain_api.nodes.repository import NodeRepository
from octrain_api.nodes.schemas import (
    EngineState,
    LeftoverOrder,
    NodeHeartbeatAnswer,
    NodeHeartbeatRequest,
    NodeObject,
    PlacedAttempt,
    RegisterAnswer,
    RegisterRequest,
)
from octrain_api.numbers import clean
from octrain_api.problems import Problem, not_found
from octrain_api.settings import Settings


def queue_of(node_id: str) -> str:
    """The Celery queue of a node."""
    return f"node.{node_id}"


class NodeService:
    """Nodes belong to the owner of the key that registered them, and are served by one key."""

    def __init__(self, session: AsyncSession, settings: Settings) -> None:
        self._session = session
        self._settings = settings.controller
        self._nodes = NodeRepository(session)

    async def register(self, request: RegisterRequest, principal: Principal) -> RegisterAnswer:
        """Store what the node says of itself; the same name keeps the same id."""
        node = await self._nodes.claim_name(request.name)
        owner = principal.owner
        if node is not None and node.owner != owner:
            raise Problem(
                403,
                "node-name-taken",
                "Not allowed",
                f"A node named {request.name!r} belongs to another owner; choose another name.",
            )
        if principal.node != request.name:
            await KeyService(self._session).bind(principal.key_id, request.name)
        values = clean(request.model_dump(mode="json", exclude={"name"}))
        if node is None:
            node = Node(id=new_id("node"), name=request.name, owner=owner, **values)
            await self._nodes.add(node)
        else:
            if node.boot_id != request.boot_id:
                # Attempts before their node, like everybody who locks both.
                await self._nodes.expire_leases(node.id)
            node = await self._nodes.lock(node.id)
            assert node is not None
            for name, value in values.items():
                setattr(node, name, value)
            await self._nodes.described(node)
            await self._nodes.heard(node)
            # What a worker took from the queue just before it went down is sent again at once.
            await self._nodes.send_messages_again(queue_of(node.id))
        await notify_queue(self._session)
        return RegisterAnswer(
            node_id=node.id,
            queue=queue_of(node.id),
            heartbeat_interval_seconds=self._settings.heartbeat_interval,
        )

    async def heartbeat(
        self, node_id: str, node_name: str | None, request: NodeHeartbeatRequest
    ) -> NodeHeartbeatAnswer:
        """The node's worker is heard, and told what it may have missed and what it can remove."""
        node = await self._nodes.lock(node_id)
        if node is None or node.name != node_name:
            raise not_found("node", node_id)
        if node.unreachable_since is not None:
            await notify_queue(self._session)
        await self._nodes.heard(node)
        leftovers = LeftoverRepository(self._session)
        await leftovers.removed(node, request.removed)
        if request.stopping:
            # Its jobs come back to the queue in a moment, and must not be placed there again.
            await self._nodes.left(node, self._settings.heartbeat_ttl)
            return NodeHeartbeatAnswer(wanted="drain" if node.wanted == "drain" else "run")
        missed = await AttemptRepository(self._session).unclaimed_on(
            node.id, self._settings.heartbeat_interval
        )
        return NodeHeartbeatAnswer(
            wanted="drain" if node.wanted == "drain" else "run",
            placed=[
                PlacedAttempt(attempt_id=one.id, job_id=one.job_id, attempt=one.number)
                for one in missed
                if one.id not in request.active_attempts
            ],
            leftovers=[
                LeftoverOrder(id=one.id, url=one.url, keep=await leftovers.kept_below(one.url))
                for one in await leftovers.due(node)
            ],
        )

    async def drain(self, node_id: str, release: bool, who: str) -> NodeObject:
        """Place nothing more on the node; with `release`, also send its jobs back to the queue.

        They save first. It costs them no restart.
        """
        if release:
            # Jobs, then attempts, each in the order of ids, then the node: the order of all others.
            # What is placed in between stays, and is released by the next call.
            rows = await self._nodes.live_attempts_on(node_id)
            jobs = JobRepository(self._session)
            locked = [await jobs.lock(job_id) for job_id in sorted(row.job_id for row in rows)]
            await self._nodes.lock_attempts(sorted(row.id for row in rows))
            for job in locked:
                if job is not None:
                    await self._release(job, node_id, who)
        node = await self._locked(node_id)
        node.wanted = "drain"
        return await self._object(node)

    async def undrain(self, node_id: str) -> NodeObject:
        """Place jobs on the node again."""
        node = await self._locked(node_id)
        node.wanted = "run"
        await notify_queue(self._session)
        return await self._object(node)

    async def release(self, node_id: str) -> NodeObject:
        """Take a node back that was set aside for repeated faults; the count begins anew."""
        node = await self._locked(node_id)
        await self._nodes.release(node)
        await notify_queue(self._session)
        return await self._object(node)

    async def _locked(self, node_id: str) -> Node:
        node = await self._nodes.lock(node_id)
        if node is None:
            raise not_found("node", node_id)
        return node

    async def _release(self, job: Job, node_id: str, who: str) -> None:
        attempt = await JobRepository(self._session).live_attempt(job.id)
        if attempt is None or attempt.node_id != node_id:
            return
        if job.status not in (Status.STARTING, Status.RUNNING):
            return
        claimed = attempt.claimed_at is not None
        if not claimed:
            await AttemptRepository(self._session).end(
                attempt, outcome="stopped", reason=Reason.NODE_DRAINED
            )
        await transitions.apply(
            self._session,
            job,
            Status.PAUSING if claimed else Status.QUEUED,
            Actor.USER,
            attempt=attempt,
            message="Its node is drained; the job saves and goes back to the queue."
            if claimed
            else "Its node is drained before it took the attempt; the job is queued again.",
            reason=Reason.NODE_DRAINED if claimed else None,
            data={"attempt_id": attempt.id, "node_id": node_id},
            who=who,
        )
        if not claimed:
            job.avoid_nodes = [node_id]

    async def _object(self, node: Node) -> NodeObject:
        await self._session.flush()
        return next(item for item in await self.list_all() if item.id == node.id)

    async def list_all(self) -> list[NodeObject]:
        """Every node with its free and used slots."""
        used: defaultdict[str, list[Attempt]] = defaultdict(list)
        for attempt in await self._nodes.live_attempts():
            used[attempt.node_id].append(attempt)
        rows = await self._nodes.all_with_liveness(self._settings.heartbeat_ttl)
        return [_node_object(node, live, used[node.id]) for node, live in rows]


def _node_object(node: Node, live: bool, attempts: list[Attempt]) -> NodeObject:
    # One damaged row must not hide all the other nodes.
    gpus, engines = (node.gpus, node.engines) if is_readable(node) else ([], {})
    return NodeObject(
        id=node.id,
        name=node.name,
        hostname=node.hostname,
        version=node.version,
        live=live,
        wanted=node.wanted,
        device_kinds=node.device_kinds,
        cpu_slots=node.cpu_slots,
        cpu_slots_used=sum(attempt.cpu_slots for attempt in attempts),
        gpus=gpus,
        gpus_used=sorted(index for attempt in attempts for index in attempt.gpu_indices),
        engines={name: EngineState(**state) for name, state in engines.items()},
        roots=node.roots,
        private_roots=node.private_roots,
        artifact_url=node.artifact_url,
        registered_at=node.registered_at,
        last_heartbeat_at=node.last_heartbeat_at,
        unreachable_since=node.unreachable_since,
        quarantined_since=node.quarantined_since,
        quarantine_detail=node.quarantine_detail,
    )
