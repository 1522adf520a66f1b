"""Jobs over HTTP."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.audit.recording import entry_of_change, note_target, note_written
from octrain_api.auth import Principal, Reader, Writer
from octrain_api.dependencies import Context, ContextDep, SessionDep
from octrain_api.idempotency.once import Once, OnceDep
from octrain_api.jobs.reading import LONGEST_TAGS, Known, conditional
from octrain_api.jobs.rows import JobRow
from octrain_api.jobs.schemas import EXAMPLE_SPEC, JobDetail
from octrain_api.jobs.service import JobService
from octrain_api.jobs.views import detail_of
from octrain_api.problems import Problem, ProblemError, not_found

router = APIRouter(prefix="/jobs", tags=["jobs"])

_MAX_WAIT = 60

AllowWaiting = Annotated[
    bool, Query(description="queue it even if no registered node could ever run it")
]

SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The job's spec. `model`, `data` and `recipe` are enough: every default is "
        "filled in and stored with the job.",
        "content": {
            "application/json": {
                # Filled in by octrain_api.docs, from the spec's own JSON schema.
                "schema": {"$ref": "#/components/schemas/JobSpec"},
                "examples": {
                    "tiny-llama": {
                        "summary": "A tiny Llama from random weights, FP8 emulated on any machine",
                        "value": EXAMPLE_SPEC,
                    }
                },
            }
        },
    }
}


async def read_spec(request: Request, context: Context) -> dict[str, Any]:
    """The JSON object of a request's body, no larger than a spec may be."""
    body = await request.body()
    if len(body) > context.settings.http.max_spec_bytes:
        limit = context.settings.http.max_spec_bytes
        raise Problem(413, "body-too-large", "Body too large", f"A spec has {limit} bytes at most.")
    value = getattr(request.state, "json", None)
    if not isinstance(value, dict):
        message = "send a JSON object: the job's spec" if body else "the body is empty: send a spec"
        error = ProblemError(pointer="", message=message, code="type")
        raise Problem(422, "spec-invalid", "The job's spec is not valid", message, errors=[error])
    return value


def shown(job: JobRow) -> Response:
    """The answer that shows a job."""
    return Response(detail_of(job), media_type="application/json")


def made(request: Request, job: JobRow, once: Once) -> Response:
    """The answer to a request that made a job, or whose Idempotency-Key made one before."""
    note_target(request, job.id)
    if not once.is_replay:
        note_written(request)
    response = shown(job)
    response.status_code = 201
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    once.mark(response)
    return response


@router.post("", status_code=201, response_model=JobDetail, openapi_extra=SPEC_BODY)
async def create_job(
    request: Request,
    session: SessionDep,
    context: ContextDep,
    principal: Writer,
    once: OnceDep,
    allow_waiting: AllowWaiting = False,
    draft: Annotated[
        bool, Query(description="store it without queueing it; POST /jobs/{id}/start does that")
    ] = False,
) -> Any:
    """Submit a job. It is stored when this answers, whatever happens to any other part."""
    return await make_job(
        request, session, context, principal, once, allow_waiting=allow_waiting, draft=draft
    )


async def make_job(
    request: Request,
    session: AsyncSession,
    context: Context,
    principal: Principal,
    once: Once,
    *,
    allow_waiting: bool = False,
    draft: bool = False,
) -> Response:
    """The job of the request's body, or the one that its key made before."""
    body = await read_spec(request, context)
    service = JobService(session, context.settings, principal)
    job = await service.submit(
        body,
        once,
        allow_waiting,
        given=body,
        draft=draft,
        entry=entry_of_change(request),
        together=context.new_jobs,
    )
    return made(request, job, once)


@router.get("/{job_id}", response_model=JobDetail, responses={304: {"description": "Unchanged"}})
async def get_job(
    job_id: str,
    context: ContextDep,
    principal: Reader,
    wait: Annotated[
        float, Query(ge=0, le=_MAX_WAIT, description="seconds to wait for what is not known yet")
    ] = 0,
    since_version: Annotated[int | None, Query(ge=0, le=2**62, description="with `wait`")] = None,
    if_none_match: Annotated[str | None, Header(max_length=LONGEST_TAGS)] = None,
) -> Any:
    """One job. `If-None-Match` can give 304; with `wait` the answer comes at the next change.

    What is waited for is a tag other than those in `If-None-Match`, or a `version` above
    `since_version`, or that `waiting_for` or `queue_*` change meanwhile. Only the tag tells of a
    change of these between two requests.
    """
    known = Known(since_version, if_none_match)
    if wait > 0:
        poll = context.settings.http.stream_poll
        view = await context.jobs.read_after_change(
            job_id, known, wait, poll, principal.visible_owner
        )
    else:
        view = await context.jobs.read(job_id)
    if view is None or not principal.sees(view.owner):
        raise not_found("job", job_id)
    return conditional(view.body, view.etag, if_none_match)


@router.post("/{job_id}/cancel", response_model=JobDetail)
async def cancel_job(
    job_id: str, session: SessionDep, context: ContextDep, principal: Writer
) -> Any:
    """Ask for the job's end. Asking again, or after its end, answers 200 and changes nothing."""
    service = JobService(session, context.settings, principal)
    await service.cancel(job_id)
    return shown(await service.get(job_id))


@router.post("/{job_id}/pause", response_model=JobDetail)
async def pause_job(
    job_id: str, session: SessionDep, context: ContextDep, principal: Writer
) -> Any:
    """Checkpoint the job and free its node. Asking again answers 200; a final job gives 409."""
    service = JobService(session, context.settings, principal)
    await service.pause(job_id)
    return shown(await service.get(job_id))


@router.post("/{job_id}/resume", response_model=JobDetail)
async def resume_job(
    job_id: str, session: SessionDep, context: ContextDep, principal: Writer
) -> Any:
    """Queue a paused job again; it goes on from its newest checkpoint."""
    service = JobService(session, context.settings, principal)
    await service.resume(job_id)
    return shown(await service.get(job_id))
