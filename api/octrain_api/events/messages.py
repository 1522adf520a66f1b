"""Events as messages of a stream."""

from typing import Any

from octrain_api.events.schemas import event_object
from octrain_api.models import Event
from octrain_api.streaming.messages import Kind, encode


def event_kind(event: Event) -> Kind:
    """What a reader must have chosen to be told of it."""
    return Kind.STATUS if event.kind == "status" else Kind.EVENTS


def event_message(event: Event, identifier: str, **more: Any) -> bytes:
    """An event as a message `status` or `event`."""
    body = event_object(event).model_dump(mode="json") | more
    if event.kind == "status":
        data = event.data
        body |= {"status": data["to"], "reason": data["reason"], "detail": data["detail"]}
        return encode("status", body, identifier)
    return encode("event", body, identifier)
