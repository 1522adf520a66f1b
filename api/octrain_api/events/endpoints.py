"""Events over HTTP."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from octrain_api.dependencies import SessionDep
from octrain_api.events.repository import EventRepository
from octrain_api.jobs.access import VisibleJob
from octrain_api.models import Event

router = APIRouter(prefix="/jobs", tags=["jobs"])


class EventObject(BaseModel):
    """Something that happened to a job."""

    seq: int = Field(description="rises within the job; metric and log batches take numbers too")
    time: datetime
    kind: str
    actor: str
    message: str
    attempt: int | None
    data: dict[str, Any]


class EventList(BaseModel):
    """Events in order."""

    items: list[EventObject]
    next_after: int = Field(description="pass it as `after` for what comes next")


def event_object(event: Event) -> EventObject:
    """An event as readers see it."""
    return EventObject(
        seq=event.seq,
        time=event.time,
        kind=event.kind,
        actor=event.actor,
        message=event.message,
        attempt=event.attempt,
        data=event.data,
    )


@router.get("/{job_id}/events")
async def list_events(
    job: VisibleJob,
    session: SessionDep,
    after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> EventList:
    """What happened to the job, oldest first: also its audit trail."""
    events = await EventRepository(session).list_after(job.id, after, limit)
    return EventList(
        items=[event_object(event) for event in events],
        next_after=events[-1].seq if events else after,
    )
