"""Server-sent events: the wire format, and a stream that goes on after a broken connection."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator

from octrain.client.errors import OctrainError, ServerUnreachable
from octrain.client.models import StreamEvent
from octrain.client.transport import Transport

# The server sends a comment at least every 15 s; three missed ones mean a dead connection.
SILENCE_SECONDS = 45.0


def parse_events(lines: Iterable[str]) -> Iterator[StreamEvent]:
    """The events in the lines of a text/event-stream (WHATWG HTML 9.2.6), comments left out."""
    identifier: int | str | None = None
    kind, data = "", list[str]()
    for line in lines:
        if line == "":
            if data:
                text = "\n".join(data)
                body = json.loads(text) if text else {}
                yield StreamEvent(
                    id=identifier,
                    type=kind or "message",
                    data=body if isinstance(body, dict) else {"value": body},
                )
            kind, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id":
            identifier = int(value) if value.isdigit() else value or None


def follow(
    transport: Transport,
    path: str,
    *,
    after: int | str | None = None,
    patience_seconds: float = 60.0,
) -> Iterator[StreamEvent]:
    """Every event after the id ``after``, each once, until ``end``.

    A broken connection, or one that the server has ended for its age, is opened again from the
    last event seen; ServerUnreachable is raised when that has not worked for ``patience_seconds``.
    """
    lost_at: float | None = None
    while True:
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = str(after)
        try:
            with transport.stream(path, headers=headers, read_timeout=SILENCE_SECONDS) as answer:
                for event in parse_events(answer.iter_lines()):
                    lost_at = None
                    if event.type == "reconnect":
                        after = event.data.get("after", after)
                        continue
                    if event.id is not None:
                        after = event.id
                    yield event
                    if event.type == "end":
                        return
        except ServerUnreachable:
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > patience_seconds:
                raise
        except OctrainError as error:
            lost_at = lost_at or time.monotonic()
            if error.status < 500 or time.monotonic() - lost_at > patience_seconds:
                raise
        time.sleep(0.5)
