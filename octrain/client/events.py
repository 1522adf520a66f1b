"""Server-sent events: the wire format, and a stream that goes on after a broken connection."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing

from octrain.client.errors import OctrainError, may_pass
from octrain.client.models import StreamEvent
from octrain.client.session import Session

# The server sends a comment at least every 15 s; three missed ones mean a dead connection.
SILENCE_SECONDS = 45.0
# How long a server may be away, as one is that is started again.
PATIENCE_SECONDS = 60.0
_PAUSE = 0.5


class EventParser:
    """Lines of a text/event-stream to events (WHATWG HTML 9.2.6), comments left out."""

    def __init__(self) -> None:
        self._identifier: int | str | None = None
        self._kind = ""
        self._data: list[str] = []

    def take(self, line: str) -> StreamEvent | None:
        """The event that this line ends, if it does."""
        if line == "":
            kind, data = self._kind, self._data
            self._kind, self._data = "", []
            if not data:
                return None
            text = "\n".join(data)
            body = json.loads(text) if text else {}
            return StreamEvent(
                id=self._identifier,
                type=kind or "message",
                data=body if isinstance(body, dict) else {"value": body},
            )
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._kind = value
        elif name == "id":
            self._identifier = int(value) if value.isdigit() else value or None
        return None


def parse_events(lines: Iterable[str]) -> Iterator[StreamEvent]:
    """The events in the lines of a text/event-stream."""
    parser = EventParser()
    for line in lines:
        event = parser.take(line)
        if event is not None:
            yield event


async def follow(
    session: Session,
    path: str,
    *,
    after: int | str | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> AsyncGenerator[StreamEvent, None]:
    """Every event after the id ``after``, each once, until ``end``.

    A broken connection, or one that the server has ended for its age, is opened again from the
    last event seen; ServerUnreachable is raised when that has not worked for ``patience_seconds``,
    and at once where no server has ever answered.
    """
    lost_at: float | None = None
    while True:
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = str(after)
        pause = _PAUSE
        try:
            async with session.stream(path, headers=headers, read_timeout=SILENCE_SECONDS) as body:
                parser = EventParser()
                async with aclosing(body.lines()) as lines:
                    async for line in lines:
                        event = parser.take(line)
                        if event is None:
                            continue
                        lost_at = None
                        if event.type == "reconnect":
                            after = event.data.get("after", after)
                            continue
                        if event.id is not None:
                            after = event.id
                        yield event
                        if event.type == "end":
                            return
        except OctrainError as error:
            lost_at = lost_at or time.monotonic()
            passes = may_pass(error) and not session.never_answered(error)
            if not passes or time.monotonic() - lost_at > patience_seconds:
                raise
            pause = max(_PAUSE, min(error.retry_after or 0.0, 30.0))
        await session.exchange.sleep(pause)
