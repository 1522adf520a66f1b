"""What a batch of telemetry records changes: metrics, logs, progress, phase, events."""

import math
from typing import Any

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.attempts.body import Batch, Frame
from octrain_api.attempts.progress import follow_checkpoint, note_progress
from octrain_api.attempts.repository import AttemptRepository
from octrain_api.attempts.schemas import (
    ArtifactRecord,
    CheckpointRecord,
    EventRecord,
    LogRecord,
    LostRecord,
    MetricsRecord,
    PhaseRecord,
    ProgressRecord,
    Record,
    record_adapter,
)
from octrain_api.events.repository import EventRepository
from octrain_api.jobs import transitions
from octrain_api.jobs.transitions import Actor, Status
from octrain_api.listener import notify_job
from octrain_api.logs.repository import LogRepository
from octrain_api.logs.schemas import NewLine
from octrain_api.metrics.blocks import Block, Packed, of_records
from octrain_api.metrics.blocks import Record as MetricRow
from octrain_api.metrics.codec import UNKNOWN_TOKENS
from octrain_api.metrics.latest import headline
from octrain_api.metrics.repository import MetricRepository
from octrain_api.models import Attempt, Job
from octrain_api.numbers import clean, clean_text

# The kind of event by which a node tells that a stored checkpoint does not verify.
CHECKPOINT_TORN = "checkpoint_torn"


def _understand(raw: dict[str, Any]) -> Record:
    try:
        return record_adapter.validate_python(raw)
    except ValidationError:
        # Output may hold bytes that are no text; the rest of such a record is still good.
        return record_adapter.validate_python(clean(raw))


def _point(record: MetricsRecord) -> MetricRow:
    return MetricRow(
        record.step,
        math.nan if record.time is None else record.time,
        UNKNOWN_TOKENS if record.tokens is None else record.tokens,
        {clean_text(name): value for name, value in record.values.items()},
    )


class TelemetryWriter:
    """Stores one batch of a locked attempt of a locked job.

    Records of one kind become one chunk, numbered in the job's stream after the batch's events, so
    that one row per series and batch is written whatever the number of steps in it.
    """

    def __init__(self, session: AsyncSession, job: Job, attempt: Attempt) -> None:
        self._session = session
        self._job = job
        self._attempt = attempt
        self._points: list[MetricRow] = []
        self._blocks: list[tuple[Block, Packed]] = []
        self._lines: list[NewLine] = []
        self._moved = False

    async def write(self, batch: Batch) -> None:
        """Store the records; the caller has cut off those that are stored already."""
        changed = False
        parts: list[tuple[int, dict[str, Any] | Frame]] = list(batch.records)
        parts += [(frame.offsets[-1], frame) for frame in batch.frames]
        for offset, part in sorted(parts, key=lambda numbered: numbered[0]):
            if isinstance(part, Frame):
                await self._training_began()
                self._at_step(int(part.block.rows.steps[-1]))
                self._blocks.append((part.block, part.packed))
                continue
            try:
                record = _understand(part)
            except ValidationError as error:
                await self._refuse(batch.first_seq + offset, part, error)
                continue
            changed = await self._take(record) or changed
        await self._flush_metrics()
        await self._flush_logs()
        if self._moved:
            await note_progress(self._session, self._job, self._attempt)
        if changed or self._blocks or self._lines:
            self._job.version += 1
            await notify_job(self._session, self._job.id)
        await self._session.flush()

    async def _take(self, record: Record) -> bool:
        """Apply one record; whether the job's row changed without an event."""
        match record:
            case MetricsRecord():
                await self._training_began()
                self._at_step(record.step)
                if record.values:
                    self._points.append(_point(record))
                return False
            case ProgressRecord():
                await self._training_began()
                self._progress(record)
                return True
            case PhaseRecord():
                self._attempt.phase = clean_text(record.phase)
                self._moved = True
                if record.phase == "training":
                    await self._training_began()
                await self._event("phase", f"The trainer is {self._attempt.phase}.", {})
                return True
            case EventRecord():
                await self._event(record.kind, record.message, record.data)
                if record.kind == CHECKPOINT_TORN:
                    await self._checkpoint_torn(record.data)
            case CheckpointRecord():
                await self._event(
                    "checkpoint",
                    f"The trainer wrote a checkpoint at step {record.step}.",
                    record.model_dump(exclude={"type"}),
                )
            case ArtifactRecord():
                await self._event(
                    "artifact_written",
                    f"The trainer wrote its {record.kind}.",
                    record.model_dump(exclude={"type"}),
                )
            case LogRecord():
                stream, text = clean_text(record.stream), clean_text(record.text)
                line = NewLine(record.time, stream, text, record.level, record.rank)
                self._lines.append(line)
            case LostRecord():
                pass
        return False

    async def _training_began(self) -> None:
        if self._job.status == Status.STARTING:
            await transitions.apply(
                self._session,
                self._job,
                Status.RUNNING,
                Actor.SUPERVISOR,
                attempt=self._attempt,
                message="Training began.",
                data={"traceparent": self._job.traceparent} if self._job.traceparent else None,
            )

    def _progress(self, record: ProgressRecord) -> None:
        job = self._job
        self._at_step(record.step)
        job.step = record.step
        job.eta_seconds = record.eta_seconds
        if record.total_steps is not None:
            job.total_steps = record.total_steps
        if record.tokens is not None:
            job.tokens = record.tokens

    def _at_step(self, step: int) -> None:
        self._moved = self._moved or step != self._attempt.step
        self._attempt.step = step

    async def _checkpoint_torn(self, data: dict[str, Any]) -> None:
        """The node has read a stored checkpoint and found other files than were registered."""
        artifact_id = data.get("artifact_id")
        if isinstance(artifact_id, str):
            attempts = AttemptRepository(self._session)
            if await attempts.mark_damaged(self._job.id, clean_text(artifact_id)):
                await follow_checkpoint(self._session, self._job)

    async def _event(self, kind: str, message: str, data: dict[str, Any]) -> None:
        # `status` belongs to the transition table alone.
        kind = "trainer_status" if kind == "status" else clean_text(kind)
        await EventRepository(self._session).append(
            self._job,
            kind=kind,
            actor="trainer",
            message=clean_text(message),
            attempt=self._attempt.number,
            data=clean(data),
        )

    async def _refuse(self, seq: int, raw: dict[str, Any], error: ValidationError) -> None:
        """One bad record stops neither the batch nor the training, but it is told."""
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        await self._event(
            "record_refused",
            f"Telemetry record {seq} was not understood: {where}: {first['msg']}",
            {"seq": seq, "type": str(raw.get("type"))[:64]},
        )

    async def _flush_metrics(self) -> None:
        self._blocks += [(block, block.pack()) for block in of_records(self._points)]
        if not self._blocks:
            return
        job = self._job
        job.sequence += 1
        metrics = MetricRepository(self._session)
        await metrics.append(job.id, self._attempt.number, job.sequence, self._blocks)
        job.latest_metrics = headline(job.latest_metrics, [block for block, _ in self._blocks])

    async def _flush_logs(self) -> None:
        if not self._lines:
            return
        job = self._job
        job.sequence += 1
        await LogRepository(self._session).append(
            job, self._attempt.number, job.sequence, self._lines
        )
