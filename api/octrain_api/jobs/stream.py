"""The live stream of a job (SSE): exactly resumable, read from PostgreSQL.

Events, metric batches and log batches of a job share one number line, and a message's `id` is its
number there; so `Last-Event-ID` misses and repeats nothing, whichever API process answers. Of a
batch that becomes several messages only the last carries the id. `progress` is a snapshot and
carries none.
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import Database
from octrain_api.events.endpoints import event_object
from octrain_api.events.repository import EventRepository
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.transitions import FINAL
from octrain_api.listener import JobListener, wait_for
from octrain_api.logs.endpoints import lines_of
from octrain_api.logs.repository import LogRepository
from octrain_api.metrics.repository import MetricRepository
from octrain_api.models import Event, Job, LogChunk
from octrain_api.numbers import encode

# Numbers of the stream that are read at once.
_WINDOW = 500


def message(event: str, data: Any, identifier: int | None = None) -> str:
    """One server-sent event; JSON has no line breaks, so its data is one line."""
    head = f"id: {identifier}\n" if identifier is not None else ""
    return f"{head}event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


@dataclass
class JobStream:
    """One reader of one job."""

    database: Database
    listener: JobListener
    job_id: str
    after: int
    keep_alive: float
    poll: float
    _progress: dict[str, Any] = field(default_factory=dict)

    async def messages(self) -> AsyncIterator[str]:
        """The stream from the number after `after` on, until the job is final and all is told."""
        last_sent = time.monotonic()
        with self.listener.subscribe(self.job_id) as changed:
            yield "retry: 2000\n\n"
            while not self.listener.closing.is_set():
                # No connection is held while a slow reader takes its messages.
                async with self.database.session() as session:
                    job = await JobRepository(session).get(self.job_id, None)
                    if job is None:
                        return
                    batch, reached = await self._read(session, job)
                for text in batch:
                    yield text
                    last_sent = time.monotonic()
                self.after = reached
                if reached < job.sequence:
                    continue
                if job.status in FINAL:
                    yield message(
                        "end",
                        {
                            "status": job.status,
                            "is_final": True,
                            "reason": job.reason,
                            "detail": job.detail,
                            "version": job.version,
                        },
                    )
                    return
                left = self.keep_alive - (time.monotonic() - last_sent)
                await wait_for(changed, min(max(left, 0.01), self.poll))
                if time.monotonic() - last_sent >= self.keep_alive:
                    yield ": keep-alive\n\n"
                    last_sent = time.monotonic()

    async def _read(self, session: AsyncSession, job: Job) -> tuple[list[str], int]:
        """The messages of the next window, and the number up to which they reach."""
        until = min(self.after + _WINDOW, job.sequence)
        numbered: dict[int, list[str]] = {}
        if until > self.after:
            for event in await EventRepository(session).list_after(
                self.job_id, self.after, _WINDOW
            ):
                if event.seq <= until:
                    numbered[event.seq] = [_event_message(event)]
            batches = await MetricRepository(session).batches_after(self.job_id, self.after, until)
            for seq, rows in _by_seq(batches).items():
                numbered[seq] = [message("metrics", _metrics_data(rows), seq)]
            for chunk in await LogRepository(session).chunks_after_seq(
                self.job_id, self.after, until
            ):
                numbered[chunk.seq] = _log_messages(chunk)
        texts = [text for seq in sorted(numbered) for text in numbered[seq]]
        progress = {
            "step": job.step,
            "total_steps": job.total_steps,
            "tokens": job.tokens,
            "eta_seconds": job.eta_seconds,
        }
        if progress != self._progress and until == job.sequence:
            self._progress = progress
            texts.append(message("progress", progress))
        return texts, max(until, self.after)


def _event_message(event: Event) -> str:
    body = event_object(event).model_dump(mode="json")
    if event.kind == "status":
        data = event.data
        body |= {"status": data["to"], "reason": data["reason"], "detail": data["detail"]}
        return message("status", body, event.seq)
    return message("event", body, event.seq)


def _by_seq(rows: Any) -> dict[int, list[Row[Any]]]:
    found: dict[int, list[Row[Any]]] = {}
    for row in rows:
        found.setdefault(row.seq, []).append(row)
    return found


def _metrics_data(rows: list[Row[Any]]) -> dict[str, Any]:
    """The points of one batch, and of each metric its newest value."""
    return {
        "attempt": rows[0].attempt,
        "step": max(row.steps[-1] for row in rows),
        "values": {row.name: encode(row.values[-1]) for row in rows},
        "points": {
            row.name: [[s, encode(v)] for s, v in zip(row.steps, row.values, strict=True)]
            for row in rows
        },
    }


def _log_messages(chunk: LogChunk) -> list[str]:
    lines = [line.model_dump(mode="json") for line in lines_of(chunk)]
    texts = [message("log", line) for line in lines[:-1]]
    texts.append(message("log", lines[-1], chunk.seq))
    return texts
