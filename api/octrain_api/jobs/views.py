"""Rows to job objects."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from octrain_api.jobs import limits
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.schemas import AttemptSummary, JobObject, Progress
from octrain_api.jobs.transitions import FINAL, Status
from octrain_api.models import Attempt, Job, QueueGroup

# What a job waits for from its entry into the queue until the scheduler has looked at it.
THE_SCHEDULER = "the scheduler"
# Before an owner's name: the key under which it is told that no more of their jobs may run.
OF_OWNER = "owner:"


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
        stalled_since=attempt.stalled_since,
        unreachable_since=attempt.unreachable_since,
    )


async def job_objects(repository: JobRepository, jobs: Sequence[Job]) -> list[JobObject]:
    """The objects of these jobs, in their order, with a few queries for all of them."""
    attempts: defaultdict[str, list[AttemptSummary]] = defaultdict(list)
    if jobs:
        for attempt, node in await repository.attempts([job.id for job in jobs]):
            attempts[attempt.job_id].append(_attempt(attempt, node))
    queued = [job for job in jobs if job.status == Status.QUEUED]
    positions = await repository.queue_positions([job.id for job in queued])
    owners = {OF_OWNER + job.owner for job in queued}
    groups = await repository.queue_groups(owners | {job.need for job in queued})
    return [
        _job(job, attempts[job.id], _wait(job, positions.get(job.id), _group(job, groups)))
        for job in jobs
    ]


def _group(job: Job, groups: Mapping[str, QueueGroup]) -> QueueGroup | None:
    """What the scheduler said of the job's owner, or else of all jobs of its need."""
    return groups.get(OF_OWNER + job.owner) or groups.get(job.need)


@dataclass(frozen=True)
class Wait:
    """What a queued job waits for, as of when, and where it stands."""

    text: str
    as_of: datetime | None
    position: int | None


def object_of_new(job: Job, wait: Wait | None) -> JobObject:
    """The object of a job that has just been made: nothing has happened to it."""
    return _job(job, [], wait)


def _wait(job: Job, position: int | None, group: QueueGroup | None) -> Wait | None:
    if job.status != Status.QUEUED:
        return None
    as_of = group.as_of if group is not None else None
    start = job.next_attempt_at
    if start is not None and (as_of is None or start > as_of):
        text = f"the pause before restart {job.restarts} of {limits.max_restarts(job)}"
        return Wait(f"{text}: not before {start.isoformat(timespec='seconds')}", as_of, position)
    return Wait(group.waiting_for if group is not None else THE_SCHEDULER, as_of, position)


def _job(job: Job, attempts: list[AttemptSummary], wait: Wait | None) -> JobObject:
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
        waiting_for=wait.text if wait is not None else None,
        queue_position=wait.position if wait is not None else None,
        queue_as_of=wait.as_of if wait is not None else None,
        next_attempt_at=job.next_attempt_at,
        stop_deadline_at=job.stop_deadline_at,
        version=job.version,
        last_event=job.sequence,
        device=job.device,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        spec=job.spec,
        recipe_from=job.recipe_from,
        links={"self": base, **{part: f"{base}/{part}" for part in parts}},
    )
