"""Where a job goes when its attempt ends: by its supervisor's word, or without it."""

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.jobs import transitions
from octrain_api.jobs.transitions import Actor, Status, max_restarts
from octrain_api.models import Attempt, Job


async def after_finish(
    session: AsyncSession, job: Job, attempt: Attempt, outcome: str, resumable: bool
) -> None:
    """Move a locked job on after its supervisor has reported `outcome` of the ended attempt."""
    number, reason, detail = attempt.number, attempt.reason, attempt.detail
    to, message, restart = Status.FAILED, f"Attempt {number} failed: {reason}.", False
    if job.status == Status.CANCELLING:
        to, message, reason = Status.CANCELLED, "Cancelled.", "cancelled_by_user"
        if outcome == "succeeded":
            detail = "The training had finished before the cancel reached it."
    elif outcome == "succeeded":
        to, message = Status.SUCCEEDED, f"Attempt {number} succeeded."
    elif job.status == Status.PAUSING and (outcome == "stopped" or resumable):
        to, message = Status.PAUSED, "Paused."
    elif outcome == "stopped":
        # Its node stops, not the job: no restart is used up.
        to, message = Status.QUEUED, f"Attempt {number} was released by its node."
    elif resumable and job.restarts < max_restarts(job):
        to, restart = Status.QUEUED, True
        message = f"Attempt {number} failed ({reason}); it is started again."
    if Status(to) not in transitions.FINAL:
        reason, detail = None, None
    await transitions.apply(
        session,
        job,
        to,
        Actor.SUPERVISOR,
        message=message,
        reason=reason,
        detail=detail,
        restart=restart,
        data=_of(attempt),
    )
    _prefer_others(job, attempt)


async def after_loss(session: AsyncSession, job: Job, attempt: Attempt) -> None:
    """Move a locked job on after its attempt was ended because its lease had run out."""
    number = attempt.number
    reason: str | None = None
    detail: str | None = None
    restart = False
    if job.status == Status.CANCELLING:
        to, message, reason = Status.CANCELLED, "Cancelled by force.", "cancelled_by_user"
        detail = (
            f"The supervisor of attempt {number} did not report its end; its lease has run out, "
            "so it is presumed to have stopped the trainer."
        )
    elif job.status == Status.PAUSING:
        to, message = Status.PAUSED, f"Paused; attempt {number} was lost meanwhile."
    elif job.restarts < max_restarts(job):
        to, restart = Status.QUEUED, True
        message = f"Attempt {number} was lost; the job is started again."
    else:
        to, message, reason = Status.FAILED, f"Attempt {number} was lost.", "worker_lost"
        detail = (
            f"The supervisor of attempt {number} was not heard before its lease ran out, and the "
            f"job's {max_restarts(job)} restart(s) are used up."
        )
    await transitions.apply(
        session,
        job,
        to,
        Actor.RECONCILER,
        message=message,
        reason=reason,
        detail=detail,
        restart=restart,
        data=_of(attempt),
    )
    _prefer_others(job, attempt)


def _prefer_others(job: Job, attempt: Attempt) -> None:
    """A node that has just let the job go, perhaps while shutting down, is the last choice."""
    if job.status == Status.QUEUED:
        job.avoid_nodes = [attempt.node_id]


def _of(attempt: Attempt) -> dict[str, object]:
    return {
        "attempt_id": attempt.id,
        "attempt_outcome": attempt.outcome,
        "attempt_reason": attempt.reason,
        "attempt_detail": attempt.detail,
    }
