"""What the supervisors cannot say themselves: lost leases, silence, states that nobody owns.

Leases and downtime. A supervisor can renew its lease only while the API and the database answer,
so their absence must not count. The API notes every two seconds that it lives, this loop at every
tick; a silence longer than `downtime_tolerance` of either is downtime, and is added to every lease
(and to the deadlines of stops and of waits in the queue) in the transaction that notices it, before
any lease is judged.
Silences shorter than the tolerance are covered by `lease_margin`, which is the larger of the two.
An outage of the database stops this loop, so it shows as a silence of the loop itself.
"""

import logging
from datetime import timedelta
from functools import partial

from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec.outcomes import Reason
from octrain_api.attempts.repository import AttemptRepository
from octrain_api.clocks import API, CONTROLLER, beat, lock_clock
from octrain_api.controller.limits import enforce_limits
from octrain_api.controller.one_by_one import each_by_itself, judge_each
from octrain_api.controller.repository import ControllerRepository
from octrain_api.database import Database, database_now
from octrain_api.events.repository import EventRepository
from octrain_api.jobs import transitions
from octrain_api.jobs.endings import after_loss
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.transitions import Actor, Status
from octrain_api.nodes.repository import NodeRepository
from octrain_api.settings import ControllerSettings, SchedulerSettings, Settings

log = logging.getLogger("octrain_api.reconciler")


class Reconciler:
    """One tick: account for downtime, then judge leases, limits, silences and ownerless states."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def tick(self) -> None:
        """Do what is due."""
        database, controller = self._database, self._settings.controller
        async with database.transaction() as session:
            api_up = await _account_downtime(session, controller)
        works = [
            partial(_expire, database, controller, self._settings.scheduler),
            partial(enforce_limits, database),
            partial(_adopt_orphans, database),
        ]
        if api_up >= timedelta(seconds=controller.heartbeat_ttl):
            # Before that, everybody looks silent: nobody could be heard.
            works.insert(2, partial(_note_silence, database, controller))
        await each_by_itself(*works)


async def _account_downtime(session: AsyncSession, settings: ControllerSettings) -> timedelta:
    """Add downtime to the leases; how long the API has been up without a break."""
    tolerance = timedelta(seconds=settings.downtime_tolerance)
    api = await lock_clock(session, API)
    own = await lock_clock(session, CONTROLLER)
    now = await database_now(session)
    downtime = timedelta()
    if own is not None and now - own.alive_at > tolerance:
        downtime = now - own.alive_at
    if api is not None and now - api.alive_at > tolerance:
        downtime = max(downtime, now - max(api.alive_at, api.counted_until))
        api.counted_until = now
    if downtime:
        extended = await ControllerRepository(session).extend_leases(downtime)
        if extended:
            log.warning("%d lease(s) extended by %s of downtime", extended, downtime)
    await beat(session, CONTROLLER, settings.downtime_tolerance)
    if api is None or now - api.alive_at > tolerance:
        return timedelta()
    return now - api.up_since


async def _expire(
    database: Database, settings: ControllerSettings, scheduler: SchedulerSettings
) -> None:
    async with database.session() as session:
        rows = await ControllerRepository(session).expired(settings.lease_margin)

    async def judge(session: AsyncSession, job_id: str, attempt_id: str) -> None:
        job = await JobRepository(session).lock(job_id)
        attempts = AttemptRepository(session)
        attempt = await attempts.lock(attempt_id)
        limit = await database_now(session) - timedelta(seconds=settings.lease_margin)
        lease = attempt.lease_expires_at
        if job is None or attempt.status != "running" or lease is None or lease > limit:
            # It was heard, or ended, in between.
            return
        await attempts.end(
            attempt,
            outcome="failed",
            reason="worker_lost",
            detail="Its supervisor was not heard before the lease ran out.",
        )
        await after_loss(session, scheduler, job, attempt)
        log.warning("lost attempt %d of %s", attempt.number, job.id)

    await judge_each(database, rows, judge)


async def _note_silence(database: Database, settings: ControllerSettings) -> None:
    async with database.transaction() as session:
        await NodeRepository(session).mark_unreachable(settings.heartbeat_ttl)
        rows = await ControllerRepository(session).silent(settings.heartbeat_ttl)

    async def judge(session: AsyncSession, job_id: str, attempt_id: str) -> None:
        job = await JobRepository(session).lock(job_id)
        attempt = await AttemptRepository(session).lock(attempt_id)
        limit = await database_now(session) - timedelta(seconds=settings.heartbeat_ttl)
        heard = attempt.last_heartbeat_at
        if job is None or attempt.status != "running" or heard is None or heard > limit:
            return
        attempt.unreachable_since = heard
        await EventRepository(session).append(
            job,
            kind="node_unreachable",
            actor=Actor.RECONCILER,
            message="The supervisor is not heard; its training goes on until the lease ends.",
            attempt=attempt.number,
            data={"attempt_id": attempt.id, "last_heard_at": heard.isoformat()},
        )

    await judge_each(database, rows, judge)


async def _adopt_orphans(database: Database) -> None:
    """Jobs said to be at work while no attempt lives. No code makes them; so it is logged."""
    async with database.session() as session:
        job_ids = await ControllerRepository(session).orphans()
    await judge_each(database, [(job_id,) for job_id in job_ids], _adopt)


async def _adopt(session: AsyncSession, job_id: str) -> None:
    jobs = JobRepository(session)
    job = await jobs.lock(job_id)
    if job is None or job.status not in transitions.PLACED:
        return
    if await jobs.live_attempt(job.id) is not None:
        return
    to, reason = Status.QUEUED, None
    if job.status == Status.CANCELLING:
        to, reason = Status.FAILED, job.reason
        if reason is None:
            to, reason = Status.CANCELLED, Reason.CANCELLED_BY_USER
    elif job.status == Status.PAUSING and job.reason is None:
        to = Status.PAUSED
    await transitions.apply(
        session,
        job,
        to,
        Actor.RECONCILER,
        message="No attempt of this job lives.",
        reason=reason,
    )
    log.error("job %s had no live attempt; moved to %s", job.id, to.value)
