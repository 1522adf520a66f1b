"""The live stream of a job: exactly resumable, read from PostgreSQL.

Events, metric batches and log batches of a job share one number line, and a message's `id` is its
number there; so `Last-Event-ID` misses and repeats nothing, whichever API process answers. Of a
batch that becomes several messages only the last carries the id. `progress` is a snapshot and
carries none.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.events.messages import event_kind, event_message
from octrain_api.events.repository import EventRepository
from octrain_api.jobs.repository import JobRepository, JobState
from octrain_api.jobs.transitions import FINAL
from octrain_api.logs.repository import LogRepository
from octrain_api.logs.schemas import lines_of
from octrain_api.metrics.repository import BatchSeries, MetricRepository
from octrain_api.models import LogChunk
from octrain_api.numbers import encode as encode_number
from octrain_api.streaming.feed import Feed, Page
from octrain_api.streaming.hub import Streams
from octrain_api.streaming.messages import (
    HEAVY,
    Choice,
    Kind,
    Message,
    MetricsMessage,
    encode,
)
from octrain_api.streaming.ring import Ring

log = logging.getLogger("octrain_api.streaming")

# Numbers of the stream that are read at once: batches can be large, events are not.
_BATCHES = 64
_EVENTS = 500


class JobFeed(Feed[int]):
    """One job, for all readers that chose the same of metrics and logs."""

    def __init__(self, streams: Streams, job_id: str, kinds: frozenset[Kind]) -> None:
        super().__init__()
        self._streams = streams
        self._job_id = job_id
        self._kinds = kinds & HEAVY
        self._state: JobState | None = None
        self._progress = b""

    @classmethod
    def shared(
        cls, streams: Streams, job_id: str, choice: Choice
    ) -> tuple[tuple[str, frozenset[Kind]], Callable[[], "JobFeed"]]:
        """The key of the feed that such a reader can share, and what makes it."""
        key = (job_id, choice.kinds & HEAVY)
        return key, lambda: cls(streams, *key)

    async def run(self) -> None:
        """Follow the job until it is final and all is told, or gone, or the process closes."""
        listener = self._streams.listener
        with listener.subscribe(self._job_id) as changed:
            while not listener.closing.is_set():
                try:
                    if not await self._read_new():
                        return
                except (SQLAlchemyError, OSError) as error:
                    log.warning("the stream of %s waits for the database: %s", self._job_id, error)
                    await asyncio.sleep(1)
                    continue
                await changed.wait()
                changed.clear()

    def enter(self, after: int | None) -> tuple[int, bytes]:
        """Without a number at the job's beginning; after one that is not known, at its end."""
        state = self._state
        assert state is not None
        if after is None:
            return 0, b""
        if state.stream_floor <= after <= state.sequence or after == 0:
            return after, b""
        why = "not known here" if after > state.sequence else "too long ago"
        data = {
            "after": after,
            "last_event": state.sequence,
            "detail": f"The number {after} is {why}: read the job, its metrics and its logs anew. "
            f"The stream goes on after {state.sequence}.",
        }
        return state.sequence, encode("reset", data, str(state.sequence))

    def identifier(self, position: int) -> str:
        """The number itself."""
        return str(position)

    def snapshot(self, choice: Choice) -> bytes:
        """How far the job is."""
        return self._progress if Kind.STATUS in choice.kinds else b""

    async def history(self, after: int, until: int, choice: Choice) -> Page[int]:
        """The next numbers of the job's line."""
        async with self._streams.reads, self._streams.database.session() as session:
            return await self._read(session, after, until, choice.kinds & self._kinds)

    async def _read_new(self) -> bool:
        """Read up to the job's newest number; whether there can be more."""
        async with self._streams.reads, self._streams.database.snapshot() as session:
            state = await JobRepository(session).state(self._job_id)
            if state is None:
                if not self.started.is_set():
                    self.ring = Ring(0)
                    self.started.set()
                return False
            self._state = state
            if not self.started.is_set():
                self.ring = Ring(state.sequence)
            while self.ring.head < state.sequence:
                page = await self._read(session, self.ring.head, state.sequence, self._kinds)
                self.ring.append(page.messages, page.reached)
        self._tell_progress(state)
        self.started.set()
        if state.status not in FINAL:
            return True
        self.ring.finish(encode("end", _end_of(state)))
        return False

    def _tell_progress(self, state: JobState) -> None:
        progress = encode(
            "progress",
            {
                "step": state.step,
                "total_steps": state.total_steps,
                "tokens": state.tokens,
                "eta_seconds": state.eta_seconds,
            },
        )
        if progress != self._progress:
            self._progress = progress
            if self.started.is_set():
                message = Message(state.sequence, Kind.STATUS, progress)
                self.ring.append([message], state.sequence)

    async def _read(
        self, session: AsyncSession, after: int, until: int, heavy: frozenset[Kind]
    ) -> Page[int]:
        window = _BATCHES if heavy else _EVENTS
        if heavy:
            until = min(until, after + window)
        events = await EventRepository(session).list_between(self._job_id, after, until, window)
        if not heavy and len(events) == window:
            until = events[-1].seq
        found: list[Message[int]] = [
            Message(event.seq, event_kind(event), event_message(event, str(event.seq)))
            for event in events
        ]
        if Kind.METRICS in heavy:
            batches = await MetricRepository(session).batches_after(self._job_id, after, until)
            found += [_metrics_message(seq, rows) for seq, rows in _by_seq(batches).items()]
        if Kind.LOGS in heavy:
            chunks = await LogRepository(session).chunks_after_seq(self._job_id, after, until)
            found += [Message(chunk.seq, Kind.LOGS, _log_messages(chunk)) for chunk in chunks]
        return Page(sorted(found, key=lambda message: message.position), until)


def _end_of(state: JobState) -> dict[str, Any]:
    return {
        "status": state.status,
        "is_final": True,
        "reason": state.reason,
        "detail": state.detail,
        "version": state.version,
    }


def _by_seq(series: Sequence[BatchSeries]) -> dict[int, list[BatchSeries]]:
    found: dict[int, list[BatchSeries]] = {}
    for one in series:
        found.setdefault(one.seq, []).append(one)
    return found


def _metrics_message(seq: int, rows: Sequence[BatchSeries]) -> MetricsMessage[int]:
    """The points of one batch, and of each metric its newest value."""

    def encode_names(choice: Choice) -> bytes:
        chosen = [row for row in rows if choice.wants_metric(row.name)]
        return encode("metrics", _metrics_data(chosen), str(seq)) if chosen else b""

    points = sum(len(row.steps) for row in rows)
    return MetricsMessage(seq, encode_names, 40 * points + 40 * len(rows))


def _metrics_data(rows: Sequence[BatchSeries]) -> dict[str, Any]:
    return {
        "attempt": rows[0].attempt,
        "step": max(row.steps[-1] for row in rows),
        "values": {row.name: encode_number(row.values[-1]) for row in rows},
        "points": {
            row.name: [[s, encode_number(v)] for s, v in zip(row.steps, row.values, strict=True)]
            for row in rows
        },
    }


def _log_messages(chunk: LogChunk) -> bytes:
    lines = [line.model_dump(mode="json") for line in lines_of(chunk)]
    texts = [encode("log", line) for line in lines[:-1]]
    return b"".join([*texts, encode("log", lines[-1], str(chunk.seq))])
