"""Jobs over HTTP."""

from hashlib import blake2b
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from octrain_api.audit.recording import note_target
from octrain_api.auth import Reader, Writer
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.jobs.reading import Known, conditional
from octrain_api.jobs.repository import JobFilter, JobRepository
from octrain_api.jobs.schemas import EXAMPLE_SPEC, JobList, JobObject
from octrain_api.jobs.service import JobService, parse_body
from octrain_api.jobs.transitions import Status
from octrain_api.jobs.views import job_objects
from octrain_api.models import Job
from octrain_api.pagination import cut, decode_cursor, encode_cursor
from octrain_api.problems import Problem, ProblemError, not_found

router = APIRouter(prefix="/jobs", tags=["jobs"])

_MAX_WAIT = 60


_SPEC_BODY: dict[str, Any] = {
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


async def _one(repository: JobRepository, job: Job) -> JobObject:
    return (await job_objects(repository, [job]))[0]


@router.post("", status_code=201, openapi_extra=_SPEC_BODY)
async def create_job(
    request: Request,
    response: Response,
    session: SessionDep,
    context: ContextDep,
    principal: Writer,
    idempotency_key: Annotated[
        str | None,
        Header(min_length=1, max_length=255, description="the same key and body: the same job"),
    ] = None,
    allow_waiting: Annotated[
        bool, Query(description="queue it even if no registered node could ever run it")
    ] = False,
) -> JobObject:
    """Submit a job. It is stored when this answers, whatever happens to any other part."""
    body = await request.body()
    if len(body) > context.settings.http.max_spec_bytes:
        limit = context.settings.http.max_spec_bytes
        raise Problem(413, "body-too-large", "Body too large", f"A spec has {limit} bytes at most.")
    service = JobService(session, context.settings, principal)
    job, created = await service.submit(parse_body(body), idempotency_key, allow_waiting)
    if not created:
        response.status_code = 200
        response.headers["Idempotent-Replayed"] = "true"
    note_target(request, job.id)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return await _one(JobRepository(session), job)


def _labels(request: Request) -> tuple[tuple[str, str], ...]:
    pairs = request.query_params.multi_items()
    return tuple((k.removeprefix("label."), v) for k, v in pairs if k.startswith("label."))


def _statuses(
    status: Annotated[
        list[str] | None,
        Query(description="repeat it, or separate by commas, for several: " + ", ".join(Status)),
    ] = None,
) -> tuple[str, ...]:
    wanted = tuple(part for value in status or () for part in value.split(",") if part)
    for value in wanted:
        if value not in set(Status):
            message = f"{value!r} is not a status; there are {', '.join(Status)}"
            error = ProblemError(pointer="/query/status", message=message, code="enum")
            raise Problem(422, "request-invalid", "Request not valid", message, errors=[error])
    return wanted


@router.get("", response_model=JobList, responses={304: {"description": "Unchanged"}})
async def list_jobs(
    session: SessionDep,
    principal: Reader,
    labels: Annotated[tuple[tuple[str, str], ...], Depends(_labels)],
    statuses: Annotated[tuple[str, ...], Depends(_statuses)],
    name: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
    if_none_match: Annotated[str | None, Header(max_length=4096)] = None,
) -> Any:
    """Jobs, newest first. `label.KEY=VALUE` narrows to jobs with that label."""
    repository = JobRepository(session)
    job_filter = JobFilter(statuses, labels, name)
    after = decode_cursor(cursor) if cursor is not None else None
    jobs = await repository.page(principal.visible_owner, job_filter, limit + 1, after)
    more = cut(jobs, limit)
    page = jobs[:limit]
    next_cursor = encode_cursor(page[-1].created_at, page[-1].id) if more else None
    found = JobList(items=await job_objects(repository, page), next_cursor=next_cursor)
    body = found.model_dump_json().encode()
    return conditional(body, f'"{blake2b(body, digest_size=12).hexdigest()}"', if_none_match)


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
    return await _one(JobRepository(session), job)


@router.post("/{job_id}/pause")
async def pause_job(
    job_id: str, session: SessionDep, context: ContextDep, principal: Writer
) -> JobObject:
    """Checkpoint the job and free its node. Asking again answers 200; a final job gives 409."""
    job = await JobService(session, context.settings, principal).pause(job_id)
    return await _one(JobRepository(session), job)


@router.post("/{job_id}/resume")
async def resume_job(
    job_id: str, session: SessionDep, context: ContextDep, principal: Writer
) -> JobObject:
    """Queue a paused job again; it goes on from its newest checkpoint."""
    job = await JobService(session, context.settings, principal).resume(job_id)
    return await _one(JobRepository(session), job)
