"""A job's own limits: the time it may wait, the time it may run, stalls, and idle GPUs.

A run that must stop is stopped gently: it is told by its next heartbeat, has the job's
`cancel_deadline_seconds` to save and end, and loses its lease after that.
"""

import logging

from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec.outcomes import Reason
from octrain_api.controller.one_by_one import judge_each
from octrain_api.controller.repository import ControllerRepository
from octrain_api.database import Database, database_now
from octrain_api.events.repository import EventRepository
from octrain_api.jobs import limits, transitions
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.transitions import Actor, Status
from octrain_api.models import Attempt, Job

log = logging.getLogger("octrain_api.limits")

_AT_WORK = (Status.STARTING, Status.RUNNING)


async def enforce_limits(database: Database) -> None:
    """Fail what has waited too long, stop what has run too long, note and judge stalls."""
    async with database.session() as session:
        repository = ControllerRepository(session)
        waited = await repository.queue_time_over()
        ran = await repository.run_time_over()
        stalled = await repository.stalled()
        idle = await repository.gpu_idle()
    await judge_each(database, [(job_id,) for job_id in waited], _end_wait)
    await judge_each(database, ran, _end_run)
    await judge_each(database, stalled, _note_stall)
    await judge_each(database, idle, _end_idle)


async def _end_wait(session: AsyncSession, job_id: str) -> None:
    job = await JobRepository(session).lock(job_id)
    now = await database_now(session)
    if job is None or job.status != Status.QUEUED:
        return
    if job.queue_deadline_at is None or job.queue_deadline_at > now:
        return
    waited = limits.max_queue_time(job)
    await transitions.apply(
        session,
        job,
        Status.FAILED,
        Actor.RECONCILER,
        message=f"Nothing could run the job within {waited} s.",
        reason=Reason.QUEUE_TIME_EXCEEDED,
        detail=f"The job waited longer in the queue than its max_queue_time_seconds, {waited} s.",
    )


async def _live(
    session: AsyncSession, job_id: str, attempt_id: str
) -> tuple[Job, Attempt] | tuple[None, None]:
    """The locked rows, if this attempt is still the job's claimed one."""
    jobs = JobRepository(session)
    job = await jobs.lock(job_id)
    attempt = await jobs.live_attempt(job_id)
    if job is None or attempt is None or attempt.id != attempt_id or attempt.status != "running":
        return None, None
    return job, attempt


async def _end_run(session: AsyncSession, job_id: str, attempt_id: str) -> None:
    job, attempt = await _live(session, job_id, attempt_id)
    if job is None or job.status not in (*_AT_WORK, Status.PAUSING):
        return
    ran = limits.max_run_time(job)
    await transitions.apply(
        session,
        job,
        Status.CANCELLING,
        Actor.RECONCILER,
        attempt=attempt,
        message=f"The job has run for {ran} s; it is stopped.",
        reason=Reason.WALL_TIME_EXCEEDED,
        detail=f"Its runs together have taken max_run_time_seconds, {ran} s.",
    )
    log.info("stopping %s: it has run for %s s", job.id, ran)


async def _end_idle(session: AsyncSession, job_id: str, attempt_id: str) -> None:
    job, attempt = await _live(session, job_id, attempt_id)
    if job is None or job.status not in _AT_WORK:
        return
    bound = limits.idle_gpu_timeout(job)
    idle = await ControllerRepository(session).gpu_idle_seconds(attempt_id)
    if bound is None or idle <= bound:
        return
    await transitions.apply(
        session,
        job,
        Status.CANCELLING,
        Actor.RECONCILER,
        attempt=attempt,
        message=f"The GPUs of the run have lain idle for {idle:.0f} s; it is stopped.",
        reason=Reason.GPU_IDLE,
        detail=(
            "All GPUs of the run showed a utilisation below 1 % for longer than its "
            f"idle_gpu_timeout_seconds, {bound} s."
        ),
    )
    log.info("stopping %s: its GPUs have lain idle for %.0f s", job.id, idle)


async def _note_stall(session: AsyncSession, job_id: str, attempt_id: str) -> None:
    job, attempt = await _live(session, job_id, attempt_id)
    if job is None or attempt is None or attempt.stalled_since is not None:
        return
    heard, since, bound = attempt.last_heartbeat_at, attempt.progress_at, attempt.stall_seconds
    if heard is None or since is None or bound is None:
        return
    silence = (heard - since).total_seconds()
    if silence <= bound:
        return
    attempt.stalled_since = since
    policy = limits.on_stall(job)
    await EventRepository(session).append(
        job,
        kind="stalled",
        actor=Actor.RECONCILER,
        message=f"No step and no new phase for {silence:.0f} s; the supervisor is heard.",
        attempt=attempt.number,
        data={
            "attempt_id": attempt.id,
            "since": since.isoformat(),
            "step": attempt.step,
            "phase": attempt.phase,
            "on_stall": policy,
        },
    )
    if policy == "report" or job.status not in _AT_WORK:
        return
    restart = policy == "restart" and job.restarts < limits.max_restarts(job)
    detail = f"Attempt {attempt.number} made no step for {bound} s, its stall_timeout_seconds."
    if policy == "restart" and not restart:
        detail += f" The job's {limits.max_restarts(job)} restart(s) are used up."
    await transitions.apply(
        session,
        job,
        Status.PAUSING if restart else Status.CANCELLING,
        Actor.RECONCILER,
        attempt=attempt,
        message="The run has stalled; it is stopped" + (" to start again." if restart else "."),
        reason=Reason.STALLED,
        detail=detail,
    )
