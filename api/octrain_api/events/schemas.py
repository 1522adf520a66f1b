"""Events as readers see them."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from octrain_api.models import Event


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
    next_after: int = Field(
        description="pass it as `after` for what came later: the number of the newest one here"
    )
    next_before: int | None = Field(
        description="pass it as `before` for what came earlier; null when there is nothing"
    )


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
