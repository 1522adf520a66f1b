"""Jobs over HTTP."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response

from octrain_api.audit.recording import entry_of_change, note_target, note_written
from octrain_api.auth import Reader, Writer
from octrain_api.dependencies import Context, ContextDep, SessionDep
from octrain_api.idempotency.once import Once, OnceDep
from octrain_api.jobs.reading import Known, conditional
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.schemas import EXAMPLE_SPEC, JobObject
from octrain_api.jobs.service import JobService, parse_body
from octrain_api.jobs.views import job_objects
from octrain_api.models import Job
from octrain_api.problems import Problem, not_found

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
    return parse_body(body)


async def one_object(repository: JobRepository, job: Job) -> JobObject:
    return (await job_objects(repository, [job]))[0]


def made(request: Request, job: JobObject, once: Once) -> Response:
    """The answer to a request that made a job, or whose Idempotency-Key made one before."""
    note_target(request, job.id)
    if not once.is_replay:
        note_written(request)
    response = Response(job.model_dump_json(), 201, media_type="application/json")
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    once.mark(response)
    return response


@router.post("", status_code=201, response_model=JobObject, openapi_extra=SPEC_BODY)
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
    body = await read_spec(request, context)
    service = JobService(session, context.settings, principal)
    job = await service.submit(
        body,
        once,
        allow_waiting,
        draft=draft,
        entry=entry_of_change(request),
        alone=context.database.single,
    )
    return made(request, job, once)


@router.get("/{job_id}", response_model=JobObject, responses={304: {"description": "Unchanged"}})
async def get_job(
    job_id: str,
    context: ContextDep,
    principal: Reader,
    wait: Annotated[
        float, Query(ge=0, le=_MAX_WAIT, description="seconds to wait for what is not known yet")
    ] = 0,
    since_version: Annotated[int | None, Query(ge=0, description="with `wait`")] = None,
    if_none_match: Annotated[str | None, Header(max_length=4096)] = None,
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


@router.post("/{job_id}/cancel")
async def cancel_job(
    job_id: str, session: SessionDep, context: ContextDep, principal: Writer
) -> JobObject:
    """Ask for the job's end. Asking again, or after its end, answers 200 and changes nothing."""
    job = await JobService(session, context.settings, principal).cancel(job_id)
    return await one_object(JobRepository(session), job)


@router.post("/{job_id}/pause")
async def pause_job(
    job_id: str, session: SessionDep, context: ContextDep, principal: Writer
) -> JobObject:
    """Checkpoint the job and free its node. Asking again answers 200; a final job gives 409."""
    job = await JobService(session, context.settings, principal).pause(job_id)
    return await one_object(JobRepository(session), job)


@router.post("/{job_id}/resume")
async def resume_job(
    job_id: str, session: SessionDep, context: ContextDep, principal: Writer
) -> JobObject:
    """Queue a paused job again; it goes on from its newest checkpoint."""
    job = await JobService(session, context.settings, principal).resume(job_id)
    return await one_object(JobRepository(session), job)
