"""Changing, cloning, starting, deleting and cancelling many jobs over HTTP."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request

from octrain_api.audit.recording import entry_of_change
from octrain_api.auth import Writer
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.idempotency.once import OnceDep
from octrain_api.jobs.endpoints import AllowWaiting, made, shown
from octrain_api.jobs.management import MOST_AT_ONCE, JobManager
from octrain_api.jobs.repository import JobFilter
from octrain_api.jobs.schemas import (
    CancelRequest,
    CancelResult,
    CancelResults,
    JobChanges,
    JobDetail,
)
from octrain_api.jobs.service import JobService
from octrain_api.problems import Problem, ProblemError

router = APIRouter(tags=["jobs"])


@router.patch("/jobs/{job_id}", response_model=JobDetail)
async def change_job(
    job_id: str, body: JobChanges, session: SessionDep, context: ContextDep, principal: Writer
) -> Any:
    """Change name, labels, notes or priority at any time, and the spec of a draft."""
    await JobManager(session, context.settings, principal).change(job_id, body)
    return shown(await JobService(session, context.settings, principal).get(job_id))


@router.post("/jobs/{job_id}/clone", status_code=201, response_model=JobDetail)
async def clone_job(
    job_id: str,
    request: Request,
    session: SessionDep,
    context: ContextDep,
    principal: Writer,
    once: OnceDep,
    overrides: Annotated[
        dict[str, Any] | None,
        Body(
            description="merge patch (RFC 7396) over the job's spec; null removes a member, and "
            "its default takes its place",
            examples=[{"name": "again", "training": {"optimizer": {"lr": 1e-4}}}],
        ),
    ] = None,
    allow_waiting: AllowWaiting = False,
    draft: Annotated[bool, Query(description="do not queue it yet")] = False,
) -> Any:
    """A new job with the spec of this one, changed where the body says so."""
    identifier = await once.earlier()
    if identifier is not None:
        job = await JobService(session, context.settings, principal).get(identifier)
    else:
        manager = JobManager(session, context.settings, principal)
        job = await manager.clone(
            job_id,
            overrides or {},
            once,
            entry=entry_of_change(request),
            allow_waiting=allow_waiting,
            draft=draft,
        )
    return made(request, job, once)


@router.post("/jobs/{job_id}/start", response_model=JobDetail)
async def start_job(
    job_id: str,
    session: SessionDep,
    context: ContextDep,
    principal: Writer,
    allow_waiting: AllowWaiting = False,
) -> Any:
    """Queue a draft, or a paused job. Asking again answers 200 and changes nothing."""
    manager = JobManager(session, context.settings, principal)
    await manager.start(job_id, allow_waiting=allow_waiting)
    return shown(await JobService(session, context.settings, principal).get(job_id))


@router.post("/jobs:cancel")
async def cancel_jobs(
    body: CancelRequest, session: SessionDep, context: ContextDep, principal: Writer
) -> CancelResults:
    """Cancel up to 500 jobs: those of `ids`, or the unfinished ones that the filters find."""
    filters = (body.status, body.labels, body.name)
    asked = [body.ids is not None, any(part is not None for part in filters), body.every]
    if sum(asked) != 1:
        message = "give either ids, or filters (status, labels, name), or every: true"
        error = ProblemError(pointer="", message=message, code="conflict")
        raise Problem(422, "request-invalid", "Request not valid", message, errors=[error])
    job_filter = JobFilter(
        tuple(status.value for status in body.status or ()),
        tuple((body.labels or {}).items()),
        body.name,
    )
    manager = JobManager(session, context.settings, principal)
    results = await manager.cancel_many(body.ids, job_filter)
    items = [CancelResult.model_validate(result, from_attributes=True) for result in results]
    return CancelResults(items=items, more=body.ids is None and len(items) == MOST_AT_ONCE)


@router.delete("/jobs/{job_id}", status_code=204)
async def delete_job(
    job_id: str, session: SessionDep, context: ContextDep, principal: Writer
) -> None:
    """Remove an ended job's (or a draft's) spec, metrics, logs and artifacts.

    Its events stay readable at `/jobs/{id}/events`, as the trail of what was done.
    """
    await JobManager(session, context.settings, principal).delete(job_id)
