"""The live stream of a job over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Query

from octrain_api.dependencies import ContextDep
from octrain_api.jobs.access import VisibleJob
from octrain_api.jobs.stream import JobFeed
from octrain_api.streaming.parameters import (
    ChoiceDep,
    LastEventId,
    MostSeconds,
    StillAllowed,
    invalid,
)
from octrain_api.streaming.response import EventStreamResponse

router = APIRouter(prefix="/jobs", tags=["jobs"])


@router.get(
    "/{job_id}/stream",
    response_class=EventStreamResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"}},
)
async def stream_job(
    job: VisibleJob,
    context: ContextDep,
    choice: ChoiceDep,
    still_allowed: StillAllowed,
    last_event_id: LastEventId = None,
    after: Annotated[
        int | None, Query(ge=0, le=2**62, description="like Last-Event-ID, which goes before it")
    ] = None,
    max_seconds: MostSeconds = None,
) -> EventStreamResponse:
    """Messages `status`, `event`, `progress`, `metrics`, `log` and, once the job is final, `end`.

    The stream begins after the number in `Last-Event-ID` (or `after`), without it at the job's
    beginning. `gap` tells a slow reader that metrics were left out, `reset` one whose number cannot
    be followed that it must read anew, `reconnect` ends a stream that is old.
    """
    if last_event_id:
        if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19):
            text = "Last-Event-ID must be a number that this stream gave"
            raise invalid("/header/Last-Event-ID", text, "number")
        after = int(last_event_id)
    streams = context.streams
    streams.admit()
    key, make = JobFeed.shared(streams, job.id, choice)
    reader = streams.reader(key, make, after, choice, still_allowed, max_seconds)
    return EventStreamResponse(reader.run, reader.leave)
