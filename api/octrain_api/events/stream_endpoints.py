"""The live stream of all jobs' events over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Query

from octrain_api.auth import Reader
from octrain_api.dependencies import ContextDep
from octrain_api.events.order import EventPosition
from octrain_api.events.stream import OwnerFeed
from octrain_api.streaming.messages import Choice, Kind
from octrain_api.streaming.parameters import (
    LastEventId,
    MostSeconds,
    StillAllowed,
    chosen,
    invalid,
)
from octrain_api.streaming.response import EventStreamResponse

router = APIRouter(prefix="/events", tags=["jobs"])

_OFFERED = frozenset({Kind.STATUS, Kind.EVENTS})


@router.get(
    "/stream",
    response_class=EventStreamResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"}},
)
async def stream_events(
    principal: Reader,
    context: ContextDep,
    still_allowed: StillAllowed,
    include: Annotated[
        list[str] | None,
        Query(description="status, events: repeat it, or use commas; both without"),
    ] = None,
    last_event_id: LastEventId = None,
    after: Annotated[
        str | None,
        Query(max_length=200, description="like Last-Event-ID, which goes before it; 0 for all"),
    ] = None,
    max_seconds: MostSeconds = None,
) -> EventStreamResponse:
    """Messages `status` and `event` of all jobs that the key sees, each with its `job_id`.

    The stream begins after the id in `Last-Event-ID` (or `after`), without it now: `begin` gives
    the id to come back with. An id is no number to calculate with.
    """
    where, text = "/header/Last-Event-ID", last_event_id
    if not text:
        where, text = "/query/after", after
    position = None
    if text:
        position = EventPosition.parse(text)
        if position is None:
            raise invalid(where, "must be an id that this stream gave", "position")
    streams = context.streams
    streams.admit()
    choice = Choice(chosen(include, _OFFERED))
    key, make = OwnerFeed.shared(streams, principal.visible_owner)
    reader = streams.reader(key, make, position, choice, still_allowed, max_seconds)
    return EventStreamResponse(reader.run, reader.leave)
