"""A spec looked at before it is a job: errors, warnings, nodes, and a node's plan of it."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.auth import Principal
from octrain_api.controller.placement import Need, device_for, need_of, refusal
from octrain_api.jobs.checks import own_root_texts
from octrain_api.jobs.service import JobService
from octrain_api.listener import notify_job
from octrain_api.models import Node, PlanRequest
from octrain_api.nodes.repository import NodeRepository
from octrain_api.nodes.schemas import NodeObject
from octrain_api.nodes.service import NodeService
from octrain_api.numbers import clean
from octrain_api.plans import warnings
from octrain_api.plans.history import like_jobs
from octrain_api.plans.key import plan_key
from octrain_api.plans.repository import PlanRepository
from octrain_api.plans.schemas import (
    NodeFit,
    PlanAnswer,
    PlanQuestion,
    TimeEstimate,
    ValidationReport,
)
from octrain_api.problems import Problem, ProblemError, not_found
from octrain_api.settings import Settings, StorageSettings

# Nodes wait for questions under this name, and readers for the answer under the plan's key.
QUESTIONS = "plans"


class PlanService:
    """Specs of one owner, or what a node is asked."""

    def __init__(self, session: AsyncSession, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._plans = PlanRepository(session)

    async def report(
        self, body: dict[str, Any], principal: Principal
    ) -> tuple[ValidationReport, str | None]:
        """What can be said of the spec now, and the key of its plan while that is worked out."""
        jobs = JobService(self._session, self._settings, principal)
        try:
            spec, recipe_from = await jobs.check(body, allow_waiting=True)
        except Problem as problem:
            if problem.status != 422:
                raise
            return _refused(problem), None
        rows = await NodeRepository(self._session).all_with_liveness(
            self._settings.controller.heartbeat_ttl
        )
        nodes = [node for node, _ in rows]
        fits = await self._fits(spec, nodes)
        errors = []
        if nodes and not any(fit.fits for fit in fits):
            why = "; ".join(fit.reason or "" for fit in fits[:5])
            errors.append(
                ProblemError(
                    pointer="/resources",
                    message=f"no registered node could run it: {why} "
                    "(with allow_waiting=true it is queued all the same)",
                    code="no_capable_node",
                )
            )
        report = ValidationReport(
            valid=not errors,
            errors=errors,
            warnings=list(warnings.of_spec(spec)),
            spec=spec,
            recipe_from=recipe_from,
            nodes=fits,
            plan_status="unavailable",
            plan_detail=None,
            plan=None,
            time=await self._time(spec, principal.owner, nodes),
        )
        if not any(live for _, live in rows):
            report.plan_detail = "No live node is there to plan it."
            return report, None
        key = plan_key(principal.owner, spec)
        found = await self._plans.ask(key, principal.owner, spec)
        if found.status == "waiting":
            await notify_job(self._session, QUESTIONS)
        return self._with_plan(report, found, nodes), key

    async def refreshed(self, report: ValidationReport, key: str) -> ValidationReport:
        """The report with what has become of its plan by now."""
        found = await self._plans.get(key)
        if found is None:
            return report
        rows = await NodeRepository(self._session).all_with_liveness(
            self._settings.controller.heartbeat_ttl
        )
        return self._with_plan(report, found, [node for node, _ in rows])

    async def take(self, node_id: str, node_name: str | None) -> PlanQuestion | None:
        """The next question for this node; 404 for a node that is not the caller's."""
        await self._node(node_id, node_name)
        found = await self._plans.take(node_id)
        return None if found is None else _question(found, self._settings.storage)

    async def answer(
        self, node_id: str, node_name: str | None, key: str, answer: PlanAnswer
    ) -> bool:
        """Store what the node found; whether it was still wanted of it."""
        await self._node(node_id, node_name)
        result, problem = clean(answer.result), clean(answer.problem)
        if result is None and not problem:
            problem = "The node gave no reason."
        stored = await self._plans.answer(key, node_id, result, problem)
        if stored:
            await notify_job(self._session, key)
        return stored

    async def _node(self, node_id: str, node_name: str | None) -> Node:
        node = await NodeRepository(self._session).get(node_id)
        if node is None or node.name != node_name:
            raise not_found("node", node_id)
        return node

    async def _fits(self, spec: dict[str, Any], nodes: Sequence[Node]) -> list[NodeFit]:
        need = need_of(spec)
        device = device_for(need, nodes)
        shown = {n.id: n for n in await NodeService(self._session, self._settings).list_all()}
        found = []
        for node in nodes:
            why = refusal(need, node, device)
            state = shown[node.id]
            found.append(
                NodeFit(
                    node=node.name,
                    fits=why is None,
                    reason=why,
                    is_live=state.live,
                    free=why is None and _has_room(state, device, need),
                )
            )
        return found

    async def _time(
        self, spec: dict[str, Any], owner: str, nodes: Sequence[Node]
    ) -> TimeEstimate | None:
        device = device_for(need_of(spec), nodes)
        found = await like_jobs(self._session, owner, spec, device)
        if not found:
            return None
        rates = sorted(rate for _, rate in found)
        rate = rates[len(rates) // 2]
        training = spec["training"]
        tokens = (
            training["steps"]
            * training["batch_size"]
            * training["sequence_length"]
            * training["gradient_accumulation"]
        )
        return TimeEstimate(
            tokens_per_second=rate,
            seconds=tokens / rate,
            from_jobs=[job_id for job_id, _ in found],
            device=device,
        )

    def _with_plan(
        self, report: ValidationReport, found: PlanRequest, nodes: Sequence[Node]
    ) -> ValidationReport:
        assert report.spec is not None
        if found.status == "ready" and found.result is not None:
            fitting = {fit.node for fit in report.nodes if fit.fits}
            memory = [
                gpu["memory_bytes"]
                for node in nodes
                if node.name in fitting and device_for(need_of(report.spec), [node]) == "cuda"
                for gpu in node.gpus
            ]
            more = list(warnings.of_plan(report.spec, found.result, memory))
            return report.model_copy(
                update={
                    "plan_status": "ready",
                    "plan_detail": None,
                    "plan": found.result,
                    "warnings": report.warnings + more,
                }
            )
        if found.status == "failed":
            return report.model_copy(update={"plan_status": "failed", "plan_detail": found.problem})
        return report.model_copy(
            update={"plan_status": "pending", "plan_detail": "A node is asked for it."}
        )


def _has_room(node: NodeObject, device: str, need: Need) -> bool:
    if not node.live or node.wanted != "run" or node.quarantined_since is not None:
        return False
    if device == "cuda":
        return len(node.gpus) - len(node.gpus_used) >= need.ranks
    return node.cpu_slots - node.cpu_slots_used >= need.ranks


def _question(found: PlanRequest, storage: StorageSettings) -> PlanQuestion:
    roots = own_root_texts(storage, found.owner)
    return PlanQuestion(key=found.key, owner=found.owner, spec=found.spec, roots=roots)


def _refused(problem: Problem) -> ValidationReport:
    errors = problem.errors or [ProblemError(pointer="", message=problem.detail, code=problem.slug)]
    return ValidationReport(
        valid=False,
        errors=errors,
        warnings=[],
        spec=None,
        recipe_from=None,
        nodes=[],
        plan_status="unavailable",
        plan_detail="The spec is not valid.",
        plan=None,
        time=None,
    )
