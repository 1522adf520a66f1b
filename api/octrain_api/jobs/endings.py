"""Where a job goes when its attempt ends: by its supervisor's word, or without it.

A failure is tried again when it may pass and restarts are left. What the service itself caused (a
node that shuts down, a preemption, an outage of the API longer than the lease) costs no restart.
"""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec.outcomes import Reason
from octrain_api.attempts.repository import AttemptRepository
from octrain_api.jobs import limits, transitions
from octrain_api.jobs.transitions import Actor, Status
from octrain_api.models import Attempt, Job
from octrain_api.nodes.faults import note_end
from octrain_api.settings import SchedulerSettings

# Seconds in which a supervisor that is heard again tells, stores and reports what it has left.
_LONGEST_REPORT = 120


@dataclass
class _Move:
    to: Status
    message: str
    reason: str | None = None
    detail: str | None = None
    restart: bool = False


async def after_finish(
    session: AsyncSession,
    settings: SchedulerSettings,
    job: Job,
    attempt: Attempt,
    outcome: str,
    resumable: bool,
) -> None:
    """Move a locked job on after its supervisor has reported `outcome` of the ended attempt."""
    number = attempt.number
    if job.reason is not None and outcome == "stopped":
        # The supervisor knows that it was to stop, the service knows why.
        attempt.reason = job.reason
    ours = _caused_by_outage(attempt)
    if outcome == "succeeded" and (job.status != Status.CANCELLING or job.reason is not None):
        move = _Move(
            Status.SUCCEEDED, f"Attempt {number} succeeded.", attempt.reason, attempt.detail
        )
    elif job.status == Status.CANCELLING:
        move = _cancelled(job, "Cancelled.")
        if outcome == "succeeded":
            move.detail = "The training had finished before the cancel reached it."
        elif job.reason is None:
            move.detail = attempt.detail
    elif outcome == "stopped":
        move = _released(job, f"Attempt {number} was released by its node.")
    else:
        passing = await _may_pass(session, job, attempt, resumable)
        move = _failed(job, attempt, f"Attempt {number} failed", passing=passing, ours=ours)
    await _apply(session, job, attempt, Actor.SUPERVISOR, move)
    await note_end(session, settings, job, attempt, ours=ours)


async def after_loss(
    session: AsyncSession, settings: SchedulerSettings, job: Job, attempt: Attempt
) -> None:
    """Move a locked job on after its attempt was ended because its lease had run out."""
    number = attempt.number
    if job.status == Status.CANCELLING:
        move = _cancelled(job, "Cancelled by force.")
        presumed = (
            f"The supervisor of attempt {number} did not report its end; its lease has run out, "
            "so it is presumed to have stopped the trainer."
        )
        move.detail = f"{move.detail} {presumed}" if move.detail else presumed
    elif job.status == Status.PAUSING:
        move = _released(job, f"Attempt {number} was lost while it was being stopped.")
    else:
        move = _failed(job, attempt, f"Attempt {number} was lost", passing=True, ours=False)
    await _apply(session, job, attempt, Actor.RECONCILER, move)
    await note_end(session, settings, job, attempt, ours=False)


def _cancelled(job: Job, message: str) -> _Move:
    """The end of a job that was told to stop: by a user, or for a limit of its own."""
    if job.reason is None:
        return _Move(Status.CANCELLED, message, Reason.CANCELLED_BY_USER)
    return _Move(Status.FAILED, f"Stopped: {job.reason}.", job.reason, job.detail)


def _released(job: Job, message: str) -> _Move:
    """The attempt stopped without a failure of its own."""
    if job.status != Status.PAUSING:
        return _Move(Status.QUEUED, message)
    if job.reason is None:
        return _Move(Status.PAUSED, "Paused.")
    if job.reason != Reason.STALLED:
        return _Move(Status.QUEUED, f"Back in the queue: {job.reason}.")
    return _Move(Status.QUEUED, "Started again: it had stalled.", restart=True)


def _failed(job: Job, attempt: Attempt, what: str, *, passing: bool, ours: bool) -> _Move:
    reason, detail = attempt.reason, attempt.detail
    if job.status == Status.PAUSING and passing:
        return _released(job, f"{what} ({reason}) while it was being stopped.")
    if passing and ours:
        message = f"{what} ({reason}) while the API was away; it is started again."
        return _Move(Status.QUEUED, message)
    if passing and job.restarts < limits.max_restarts(job):
        return _Move(Status.QUEUED, f"{what} ({reason}); it is started again.", restart=True)
    if passing and limits.max_restarts(job):
        used = f"The job's {limits.max_restarts(job)} restart(s) are used up."
        detail = f"{detail.rstrip()}\n{used}" if detail else used
    return _Move(Status.FAILED, f"{what}: {reason}.", reason, detail)


async def _may_pass(session: AsyncSession, job: Job, attempt: Attempt, resumable: bool) -> bool:
    """Whether starting the job again can help."""
    if attempt.reason in limits.DETERMINISTIC:
        return False
    if attempt.reason in (Reason.OUT_OF_MEMORY, Reason.CUDA_ERROR):
        # Another process may have held the memory, or the GPU may have been ill; twice at one step
        # it is the job's own need, or its own bug.
        return not await AttemptRepository(session).failed_like(attempt)
    return resumable


def shortest_fatal_silence(attempt: Attempt) -> timedelta:
    """After how long unanswered a supervisor may have given up its lease.

    It stops its trainer when a third of the lease is left, two minutes at most. Its count begins
    when it asks, ours when we answer; a fifth is for that difference.
    """
    lease = attempt.lease_seconds
    return timedelta(seconds=0.8 * (lease - min(lease / 3, 120)))


def _caused_by_outage(attempt: Attempt) -> bool:
    """Whether a supervisor gave up its lease because the API itself was away.

    The last silence of its lease's length was an outage. If it trained on all the same, for it was
    heard in the very moment, its later loss is another's: the steps that are told soon after an
    outage were trained before its end, those that are told later were not.
    """
    if attempt.reason != Reason.WORKER_LOST or attempt.outage_at is None:
        return False
    if attempt.progress_at is None or attempt.progress_at <= attempt.outage_at:
        return True
    soon = attempt.outage_at + timedelta(seconds=max(attempt.lease_seconds, _LONGEST_REPORT))
    return attempt.ended_at is not None and attempt.ended_at <= soon


async def _apply(
    session: AsyncSession, job: Job, attempt: Attempt, actor: Actor, move: _Move
) -> None:
    await transitions.apply(
        session,
        job,
        move.to,
        actor,
        message=move.message,
        reason=move.reason,
        detail=move.detail,
        restart=move.restart,
        data={
            "attempt_id": attempt.id,
            "attempt_outcome": attempt.outcome,
            "attempt_reason": attempt.reason,
            "attempt_detail": attempt.detail,
        },
    )
    if move.to is Status.QUEUED:
        # A node that has just let the job go, perhaps while shutting down, is the last choice.
        job.avoid_nodes = [attempt.node_id]
