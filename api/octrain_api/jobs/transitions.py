"""The life of a job: the one table of its transitions, and the one function that makes them.

Every change of a job's status goes through `apply`, which looks up `(from, to, actor)`, asks the
guard, runs the effects, and appends the event in the same transaction. The caller holds the job's
row lock. What the table does not name is refused. `octrain_api.jobs.placing` makes the one edge
from queued to starting for many jobs at once, by the same table.

While a job is pausing or cancelling, its `reason` says why the service stops it; it is null when a
user asked. So a service's pause leads back to the queue, and a service's cancel to failed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now
from octrain_api.events.repository import EventRepository
from octrain_api.jobs import limits
from octrain_api.listener import notify_queue
from octrain_api.models import Attempt, Job


class Status(StrEnum):
    """The states of a job."""

    DRAFT = "draft"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED})
# The states in which a job has a live attempt, and the only ones.
PLACED = frozenset({Status.STARTING, Status.RUNNING, Status.PAUSING, Status.CANCELLING})


class Actor(StrEnum):
    """Who makes a transition."""

    USER = "user"
    SCHEDULER = "scheduler"
    SUPERVISOR = "supervisor"
    RECONCILER = "reconciler"


class TransitionRefused(Exception):
    """The table, or a guard of it, does not allow this change now."""

    def __init__(self, current: str, to: Status, actor: Actor, why: str) -> None:
        super().__init__(f"{actor.value} may not move a job from {current} to {to.value}: {why}")
        self.current = current
        self.to = to
        self.why = why


# A guard answers None, or why the change is refused. `attempt` is the job's live attempt.
Guard = Callable[[Job, Attempt | None], str | None]
Effect = Callable[[Job, datetime], None]


@dataclass(frozen=True)
class Rule:
    """When a transition may be made, and what it does to the row beyond the status."""

    guard: Guard
    effects: tuple[Effect, ...] = ()


def _no_live_attempt(job: Job, attempt: Attempt | None) -> str | None:
    if attempt is not None:
        return f"attempt {attempt.number} still lives"
    return None


def _live_attempt(job: Job, attempt: Attempt | None) -> str | None:
    return None if attempt is not None else "it has no live attempt"


def _claimed_attempt(job: Job, attempt: Attempt | None) -> str | None:
    if attempt is None or attempt.claimed_at is None:
        return "no supervisor has claimed its attempt"
    return None


def _restart_left(job: Job, attempt: Attempt | None) -> str | None:
    if job.restarts >= limits.max_restarts(job):
        return f"its {limits.max_restarts(job)} restart(s) are used up"
    return _no_live_attempt(job, attempt)


def _restart_left_after_stop(job: Job, attempt: Attempt | None) -> str | None:
    return _stopped_by_service(job, attempt) or _restart_left(job, attempt)


def _stopped_by_service(job: Job, attempt: Attempt | None) -> str | None:
    if job.reason is None:
        return "a user asked for its stop"
    return _no_live_attempt(job, attempt)


def _stopped_by_user(job: Job, attempt: Attempt | None) -> str | None:
    if job.reason is not None:
        return f"it is being stopped for {job.reason}"
    return _no_live_attempt(job, attempt)


def _started(job: Job, now: datetime) -> None:
    job.started_at = job.started_at or now


def _ended(job: Job, now: datetime) -> None:
    job.ended_at = now
    job.eta_seconds = None
    job.stop_deadline_at = None
    _left_queue(job, now)


def _left_queue(job: Job, now: datetime) -> None:
    job.next_attempt_at = None
    job.queue_deadline_at = None


def _left_node(job: Job, now: datetime) -> None:
    job.eta_seconds = None
    job.stop_deadline_at = None


def _queued(job: Job, now: datetime) -> None:
    wait = limits.max_queue_time(job)
    job.next_attempt_at = None
    job.queue_deadline_at = now + timedelta(seconds=wait) if wait is not None else None


def _use_restart(job: Job, now: datetime) -> None:
    job.restarts += 1
    pause = timedelta(seconds=limits.backoff(job, job.restarts))
    job.next_attempt_at = now + pause if pause else None
    if job.queue_deadline_at is not None:
        # The pause is of our making; it is no part of the wait that the job allows.
        job.queue_deadline_at += pause


def _set_stop_deadline(job: Job, now: datetime) -> None:
    job.stop_deadline_at = now + timedelta(seconds=limits.cancel_deadline(job))


_S, _A = Status, Actor
_BY_USER, _BY_SUPERVISOR, _BY_RECONCILER = (_A.USER,), (_A.SUPERVISOR,), (_A.RECONCILER,)
_BOTH = (_A.SUPERVISOR, _A.RECONCILER)


def _rules() -> dict[tuple[Status, Status, Actor], Rule]:
    rules: dict[tuple[Status, Status, Actor], Rule] = {}

    def add(sources: Iterable[Status], to: Status, actors: Iterable[Actor], rule: Rule) -> None:
        for source in sources:
            for actor in actors:
                rules[source, to, actor] = rule

    at_work = (_S.STARTING, _S.RUNNING)
    end = Rule(_no_live_attempt, (_ended,))
    stop = Rule(_claimed_attempt, (_set_stop_deadline,))
    back = Rule(_no_live_attempt, (_left_node, _queued))
    # A user's wishes.
    add((_S.DRAFT,), _S.QUEUED, _BY_USER, Rule(_no_live_attempt, (_queued,)))
    add((_S.DRAFT,), _S.CANCELLED, _BY_USER, end)
    add((_S.QUEUED, _S.PAUSED), _S.CANCELLED, _BY_USER, end)
    add((_S.QUEUED,), _S.PAUSED, _BY_USER, Rule(_no_live_attempt, (_left_queue,)))
    add((_S.PAUSED,), _S.QUEUED, _BY_USER, Rule(_no_live_attempt, (_queued,)))
    add(at_work, _S.PAUSING, _BY_USER, stop)
    add((*at_work, _S.PAUSING), _S.CANCELLING, _BY_USER, stop)
    # Nobody has claimed the attempt, so nothing runs: its end is the end of the matter.
    add((_S.STARTING,), _S.CANCELLED, _BY_USER, end)
    add((_S.STARTING,), _S.PAUSED, _BY_USER, Rule(_no_live_attempt, (_left_node,)))
    add((_S.STARTING,), _S.QUEUED, _BY_USER, back)
    # Placement, and making room for a job of higher priority.
    add((_S.QUEUED,), _S.STARTING, (_A.SCHEDULER,), Rule(_live_attempt, (_left_queue,)))
    add((_S.STARTING,), _S.QUEUED, (_A.SCHEDULER,), back)
    add(at_work, _S.PAUSING, (_A.SCHEDULER,), stop)
    # What is stored of it is damaged: it can be placed nowhere.
    add((_S.QUEUED,), _S.FAILED, (_A.SCHEDULER,), end)
    # A job's own limits.
    add((_S.QUEUED,), _S.FAILED, _BY_RECONCILER, end)
    add(at_work, _S.PAUSING, _BY_RECONCILER, stop)
    add((*at_work, _S.PAUSING), _S.CANCELLING, _BY_RECONCILER, stop)
    # What a supervisor reports.
    add((_S.STARTING,), _S.RUNNING, _BY_SUPERVISOR, Rule(_claimed_attempt, (_started,)))
    done = Rule(_no_live_attempt, (_started, _ended))
    add((*at_work, _S.PAUSING), _S.SUCCEEDED, _BY_SUPERVISOR, done)
    add((*at_work, _S.PAUSING), _S.FAILED, _BOTH, end)
    # A release (a stopping node, a lost placement) costs no restart: `RESTART` below does.
    add(at_work, _S.QUEUED, _BOTH, back)
    # `reason` says why the service stops a job; without one it is a user who asked.
    add((_S.PAUSING,), _S.PAUSED, _BOTH, Rule(_stopped_by_user, (_left_node,)))
    add((_S.PAUSING,), _S.QUEUED, _BOTH, Rule(_stopped_by_service, (_left_node, _queued)))
    add((_S.CANCELLING,), _S.CANCELLED, _BOTH, Rule(_stopped_by_user, (_ended,)))
    add((_S.CANCELLING,), _S.FAILED, _BOTH, Rule(_stopped_by_service, (_ended,)))
    add((_S.CANCELLING,), _S.SUCCEEDED, _BY_SUPERVISOR, Rule(_stopped_by_service, (_ended,)))
    return rules


TABLE = _rules()

# Back to the queue at the cost of a restart: the same edges as a release, with a stricter rule.
RESTARTS: dict[tuple[Status, Status, Actor], Rule] = {
    (source, _S.QUEUED, actor): Rule(guard, (_left_node, _queued, _use_restart))
    for source, guard in (
        (_S.STARTING, _restart_left),
        (_S.RUNNING, _restart_left),
        (_S.PAUSING, _restart_left_after_stop),
    )
    for actor in _BOTH
}


async def apply(
    session: AsyncSession,
    job: Job,
    to: Status,
    actor: Actor,
    *,
    message: str,
    attempt: Attempt | None = None,
    reason: str | None = None,
    detail: str | None = None,
    restart: bool = False,
    data: dict[str, Any] | None = None,
    who: str | None = None,
) -> None:
    """Move a locked job to `to` and append the event.

    `attempt` is the job's live attempt, None when it has none (or when it has just ended);
    `restart` uses one of the job's restarts; `who` names the user in the audit trail. Raises
    TransitionRefused.
    """
    current = Status(job.status)
    rule = (RESTARTS if restart else TABLE).get((current, to, actor))
    if rule is None:
        raise TransitionRefused(current, to, actor, "there is no such transition")
    live = attempt if attempt is not None and attempt.status != "ended" else None
    refusal = rule.guard(job, live)
    if refusal is not None:
        raise TransitionRefused(current, to, actor, refusal)
    job.status = to.value
    job.reason = reason
    job.detail = detail
    now = await database_now(session)
    for effect in rule.effects:
        effect(job, now)
    await EventRepository(session).append(
        job,
        kind="status",
        actor=who or actor.value,
        message=message,
        attempt=job.attempt or None,
        data={
            "from": current.value,
            "to": to.value,
            "reason": reason,
            "detail": detail,
            **(data or {}),
        },
    )
    if to is _S.QUEUED or current in PLACED:
        # There is a job to place, or a slot may be free.
        await notify_queue(session)
