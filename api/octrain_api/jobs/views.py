"""Rows to job objects."""

from collections import defaultdict
from collections.abc import Sequence

from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.schemas import AttemptSummary, JobObject, Progress
from octrain_api.jobs.transitions import FINAL, Status
from octrain_api.models import Attempt, Job


def _attempt(attempt: Attempt, node: str) -> AttemptSummary:
    return AttemptSummary(
        id=attempt.id,
        number=attempt.number,
        node=node,
        status=attempt.status,
        phase=attempt.phase,
        device=attempt.device,
        created_at=attempt.created_at,
        started_at=attempt.claimed_at,
        ended_at=attempt.ended_at,
        outcome=attempt.outcome,
        reason=attempt.reason,
        detail=attempt.detail,
        step=attempt.step,
        unreachable_since=attempt.unreachable_since,
    )


async def job_objects(repository: JobRepository, jobs: Sequence[Job]) -> list[JobObject]:
    """The objects of these jobs, in their order, with two queries for all of them."""
    attempts: defaultdict[str, list[AttemptSummary]] = defaultdict(list)
    if jobs:
        for attempt, node in await repository.attempts([job.id for job in jobs]):
            attempts[attempt.job_id].append(_attempt(attempt, node))
    queued = [job.id for job in jobs if job.status == Status.QUEUED]
    positions = await repository.queue_positions(queued)
    return [_job(job, attempts[job.id], positions.get(job.id)) for job in jobs]


def _job(job: Job, attempts: list[AttemptSummary], position: int | None) -> JobObject:
    base = f"/v1/jobs/{job.id}"
    parts = ("events", "metrics", "logs", "stream", "artifacts", "conversion", "precision")
    return JobObject(
        id=job.id,
        name=job.name,
        labels=job.labels,
        notes=job.notes,
        priority=job.priority,
        owner=job.owner,
        status=Status(job.status),
        is_final=job.status in FINAL,
        reason=job.reason,
        detail=job.detail,
        progress=Progress(
            step=job.step,
            total_steps=job.total_steps,
            tokens=job.tokens,
            eta_seconds=job.eta_seconds,
        ),
        latest_metrics=job.latest_metrics,
        attempts=attempts,
        attempt=job.attempt,
        restarts=job.restarts,
        waiting_for=job.waiting_for,
        queue_position=position,
        version=job.version,
        last_event=job.sequence,
        device=job.device,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        spec=job.spec,
        links={"self": base, **{part: f"{base}/{part}" for part in parts}},
    )
