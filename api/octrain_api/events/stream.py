"""The live stream of the events of all jobs that a key may see.

One reader in each process reads the events of every owner, and hands each to the owner's ring. Ids
are positions in the order of `octrain_api.events.order`.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from octrain_api.events.messages import event_kind, event_message
from octrain_api.events.order import EventPosition
from octrain_api.events.repository import EventRepository
from octrain_api.listener import wait_for
from octrain_api.models import Event
from octrain_api.streaming.feed import Feed, Page, Shared
from octrain_api.streaming.hub import Streams
from octrain_api.streaming.messages import Choice, Message, encode
from octrain_api.streaming.ring import Ring

log = logging.getLogger("octrain_api.streaming")

_WINDOW = 500
# Seconds in which changes are gathered before they are read, and between the looks at events that
# an open transaction keeps back.
_GATHER = 0.01
_LONGEST_LOOK = 0.5

_LOG = "the events of all jobs"


class EventLog(Shared):
    """The events of every job as this process reads them, dealt out to the rings of owners."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams
        self._position = EventPosition(0)
        self._rings: defaultdict[str | None, set[Ring[EventPosition]]] = defaultdict(set)

    def join(self, owner: str | None) -> Ring[EventPosition]:
        """A ring of this owner's events from now on; None for every owner's."""
        ring = Ring(self._position)
        self._rings[owner].add(ring)
        return ring

    def leave(self, owner: str | None, ring: Ring[EventPosition]) -> None:
        """Fill this ring no more."""
        self._rings[owner].discard(ring)
        if not self._rings[owner]:
            del self._rings[owner]

    def close(self) -> None:
        """End every ring."""
        for rings in self._rings.values():
            for ring in rings:
                ring.finish(None)

    def wake(self) -> None:
        """Let the readers of every ring look again."""
        for rings in self._rings.values():
            for ring in rings:
                ring.wake()

    async def run(self) -> None:
        """Read what is new until the process closes."""
        listener = self._streams.listener
        look = _GATHER
        with listener.subscribe_to_any() as changed:
            while not listener.closing.is_set():
                try:
                    kept_back = await self._read_new()
                except (SQLAlchemyError, OSError) as error:
                    log.warning("the stream of events waits for the database: %s", error)
                    kept_back, look = True, 1.0
                if kept_back:
                    # Its commit wakes nobody, if it wrote no event.
                    await wait_for(changed, look)
                    look = min(look * 2, _LONGEST_LOOK)
                else:
                    look = _GATHER
                    await changed.wait()
                await asyncio.sleep(_GATHER)
                changed.clear()

    async def _read_new(self) -> bool:
        """Read all that is final; whether there is more that is not."""
        async with self._streams.reads, self._streams.database.snapshot() as session:
            events = EventRepository(session)
            oldest = await events.oldest_open()
            if not self.started.is_set():
                self._position = EventPosition(oldest)
                self.started.set()
            while True:
                rows = await events.list_in_order(self._position, None, _WINDOW)
                final = [row for row in rows if row[0].transaction_id < oldest]
                more = len(final) == _WINDOW
                self._deal_out(final, _position(final[-1][0]) if more else EventPosition(oldest))
                if not more:
                    return len(final) < len(rows)

    def _deal_out(self, rows: Sequence[Row[Event, str]], reached: EventPosition) -> None:
        self._position = max(reached, self._position)
        messages = [(owner, _message(event)) for event, owner in rows] if self._rings else []
        for wanted, rings in self._rings.items():
            mine = [message for owner, message in messages if wanted in (None, owner)]
            for ring in rings:
                if mine:
                    ring.append(mine, self._position)
                else:
                    # Nobody is woken for it.
                    ring.head = self._position


class OwnerFeed(Feed[EventPosition]):
    """The events of one owner's jobs; of every owner's for None."""

    def __init__(self, streams: Streams, owner: str | None) -> None:
        super().__init__()
        self._streams = streams
        self._owner = owner

    @classmethod
    def shared(
        cls, streams: Streams, owner: str | None
    ) -> tuple[tuple[str, str | None], Callable[[], "OwnerFeed"]]:
        """The key of this owner's feed, and what makes it."""
        return (_LOG, owner), lambda: cls(streams, owner)

    async def run(self) -> None:
        """Let the process's one reader fill the ring until cancelled, or until it ends."""
        async with self._streams.open(_LOG, lambda: EventLog(self._streams)) as events:
            self.ring = events.join(self._owner)
            self.started.set()
            try:
                await self.ring.wait_closed()
            finally:
                events.leave(self._owner, self.ring)

    def enter(self, after: EventPosition | None) -> tuple[EventPosition, bytes]:
        """Without an id from now on; after one that this database has not reached, too."""
        head = self.ring.head
        if after is not None and after <= head:
            return after, b""
        if after is None:
            return head, encode("begin", {"after": str(head)}, str(head))
        data = {
            "after": str(after),
            "detail": f"The id {after} is of another database or of the future: read the jobs "
            f"anew. The stream goes on after {head}.",
        }
        return head, encode("reset", data, str(head))

    def identifier(self, position: EventPosition) -> str:
        """The position as text."""
        return str(position)

    async def history(
        self, after: EventPosition, until: EventPosition, choice: Choice
    ) -> Page[EventPosition]:
        """The next events of this owner's jobs."""
        async with self._streams.reads, self._streams.database.session() as session:
            rows = await EventRepository(session).list_in_order(after, self._owner, _WINDOW)
        found = [_message(event) for event, _ in rows]
        kept = [message for message in found if message.position <= until]
        full = len(rows) == _WINDOW and len(kept) == len(rows)
        return Page(kept, kept[-1].position if full else until)


def _position(event: Event) -> EventPosition:
    return EventPosition(event.transaction_id, event.job_id, event.seq)


def _message(event: Event) -> Message[EventPosition]:
    position = _position(event)
    text = event_message(event, str(position), job_id=event.job_id)
    return Message(position, event_kind(event), text)
