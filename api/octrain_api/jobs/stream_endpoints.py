"""The live stream over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from octrain_api.dependencies import ContextDep
from octrain_api.jobs.access import VisibleJob
from octrain_api.jobs.stream import JobStream
from octrain_api.problems import Problem, ProblemError

router = APIRouter(prefix="/jobs", tags=["jobs"])


@router.get(
    "/{job_id}/stream",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"}},
)
async def stream_job(
    job: VisibleJob,
    context: ContextDep,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[
        int, Query(ge=0, le=2**62, description="like Last-Event-ID, which goes before it")
    ] = 0,
) -> StreamingResponse:
    """Messages `status`, `event`, `progress`, `metrics`, `log` and, once the job is final, `end`.

    The stream begins after the number in `Last-Event-ID` (or `after`), without it at the beginning.
    """
    start = after
    if last_event_id:
        if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19):
            text = "Last-Event-ID must be a number that this stream gave"
            error = ProblemError(pointer="/header/Last-Event-ID", message=text, code="number")
            raise Problem(422, "request-invalid", "Request not valid", text, errors=[error])
        start = int(last_event_id)
    stream = JobStream(
        database=context.database,
        listener=context.listener,
        job_id=job.id,
        after=start,
        keep_alive=context.settings.http.stream_keep_alive,
        poll=context.settings.http.stream_poll,
    )
    return StreamingResponse(
        stream.messages(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
