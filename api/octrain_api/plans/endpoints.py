"""Specs looked at before they are jobs, and nodes that plan them."""

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from octrain_api.auth import NodeWorker, Writer
from octrain_api.dependencies import ContextDep
from octrain_api.jobs.endpoints import SPEC_BODY, read_spec
from octrain_api.listener import wait_for
from octrain_api.plans.schemas import PlanAnswer, PlanStored, PlanTaken, ValidationReport
from octrain_api.plans.service import QUESTIONS, PlanService

router = APIRouter()

# A lost notification costs this many seconds.
_LOOK_AGAIN = 2.0

Key = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]


@router.post("/jobs:validate", tags=["jobs"], openapi_extra=SPEC_BODY)
async def validate_job(
    request: Request,
    context: ContextDep,
    principal: Writer,
    wait: Annotated[
        float, Query(ge=0, le=60, description="seconds to wait for a plan that is not ready yet")
    ] = 15,
) -> ValidationReport:
    """Say everything of a job that can be known before it is submitted. Stores no job.

    Always 200 for a body whose values can be stored: `valid` and `errors` say what POST /jobs
    would. A node works out parameters, conversion, memory and FLOPs from the spec alone; the
    answer is kept for an hour.
    """
    body = await read_spec(request, context)
    deadline = time.monotonic() + wait
    async with context.database.transaction() as session:
        service = PlanService(session, context.settings)
        report, key = await service.report(body, principal)
    if key is None or report.plan_status != "pending":
        return report
    with context.listener.subscribe(key) as answered:
        while report.plan_status == "pending" and not context.listener.closing.is_set():
            async with context.database.session() as session:
                report = await PlanService(session, context.settings).refreshed(report, key)
            left = deadline - time.monotonic()
            if report.plan_status != "pending" or left <= 0:
                break
            # No connection is held while waiting.
            await wait_for(answered, min(left, _LOOK_AGAIN))
    return report


@router.post("/nodes/{node_id}/plans:take", tags=["workers"])
async def take_plan(
    node_id: str,
    context: ContextDep,
    principal: NodeWorker,
    wait: Annotated[float, Query(ge=0, le=60, description="seconds to wait for a question")] = 20,
) -> PlanTaken:
    """The next spec that somebody wants planned; none after a while: ask again."""
    deadline = time.monotonic() + wait
    with context.listener.subscribe(QUESTIONS) as asked:
        while True:
            async with context.database.transaction() as session:
                service = PlanService(session, context.settings)
                question = await service.take(node_id, principal.node)
            left = deadline - time.monotonic()
            if question is not None or left <= 0 or context.listener.closing.is_set():
                return PlanTaken(question=question)
            await wait_for(asked, min(left, _LOOK_AGAIN))


@router.post("/nodes/{node_id}/plans/{key}", tags=["workers"])
async def answer_plan(
    node_id: str, key: Key, body: PlanAnswer, context: ContextDep, principal: NodeWorker
) -> PlanStored:
    """What the node found. An answer that is no longer wanted of it changes nothing."""
    async with context.database.transaction() as session:
        service = PlanService(session, context.settings)
        stored = await service.answer(node_id, principal.node, key, body)
    return PlanStored(stored=stored)
