"""Events over HTTP."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from octrain_api.dependencies import SessionDep
from octrain_api.events.repository import EventRepository
from octrain_api.events.schemas import EventList, event_object
from octrain_api.jobs.access import VisibleTrail

router = APIRouter(prefix="/jobs", tags=["jobs"])


@router.get("/{job_id}/events")
async def list_events(
    job: VisibleTrail,
    session: SessionDep,
    kind: Annotated[
        list[str] | None,
        Query(description="only these kinds: repeat it, or separate by commas", max_length=100),
    ] = None,
    after: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    order: Annotated[
        Literal["asc", "desc"], Query(description="oldest first, or newest first")
    ] = "asc",
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> EventList:
    """What happened to the job, numbered in (after, before): its audit trail, which outlives it."""
    kinds = [name for value in kind or () for name in value.split(",") if name]
    newest_first = order == "desc"
    events = await EventRepository(session).page(
        job.id, limit, kinds=kinds, after=after, before=before, newest_first=newest_first
    )
    numbers = [event.seq for event in events]
    more = len(events) == limit or not newest_first
    return EventList(
        items=[event_object(event) for event in events],
        next_after=max(numbers) if numbers else after or 0,
        next_before=min(numbers) if numbers and more and min(numbers) > 1 else None,
    )
