"""Jobs and nodes whose stored rows cannot be read or placed: they must not stop the others.

No code of ours writes such rows; a restore, another version or a hand may have. The job ends with a
reason, for nobody would ever pick it. The node is given nothing until it registers again.
"""

import logging
from collections.abc import Collection, Sequence

from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec.outcomes import Reason
from octrain_api.attempts.repository import AttemptRepository
from octrain_api.controller.one_by_one import judge_each
from octrain_api.controller.placement import Need
from octrain_api.controller.plan import Choice
from octrain_api.controller.queue import QueueRepository
from octrain_api.database import Database
from octrain_api.jobs import transitions
from octrain_api.jobs.placing import Placed, place_many
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.transitions import Actor, Status

log = logging.getLogger("octrain_api.scheduler")

# What the database says of rows that do not hold together. All else (it is away, is read-only for a
# while, has another schema) says nothing of a job.
DAMAGE = (DataError, IntegrityError)
# Jobs of an unreadable need that are ended at each tick.
_AT_ONCE = 50


def readable(texts: Collection[str]) -> tuple[dict[str, Need], dict[str, str]]:
    """The needs of these texts, and of those that say none what is wrong with them."""
    needs: dict[str, Need] = {}
    wrong: dict[str, str] = {}
    for text in texts:
        try:
            needs[text] = Need.parse(text)
        except ValueError as error:
            wrong[text] = str(error)
    return needs, wrong


async def end_unreadable(database: Database, wrong: dict[str, str]) -> None:
    """End the queued jobs of needs that cannot be read."""
    for text, why in wrong.items():
        async with database.session() as session:
            found = await QueueRepository(session).of_need(text, _AT_ONCE)
        await judge_each(database, [(job_id, why) for job_id in found], _end)


async def place_each(
    database: Database, choices: Sequence[Choice]
) -> tuple[list[Placed], set[str]]:
    """Place each by itself, after a batch has failed by `DAMAGE`, and end those that still do.

    Those placed, and the jobs that can neither be placed nor ended. Raises every other error: it is
    no job's fault.
    """
    placed: list[Placed] = []
    hopeless: set[str] = set()
    for choice in choices:
        try:
            async with database.transaction() as session:
                placed += await place_many(session, [choice])
            continue
        except DAMAGE as error:
            log.exception("job %s cannot be placed", choice.job_id)
            why = str(error.orig)
        try:
            async with database.transaction() as session:
                await _end(session, choice.job_id, why.partition("\n")[0])
        except DAMAGE:
            log.exception("job %s cannot be ended either; it is left alone", choice.job_id)
            hopeless.add(choice.job_id)
    return placed, hopeless


async def _end(session: AsyncSession, job_id: str, why: str) -> None:
    jobs = JobRepository(session)
    job = await jobs.lock(job_id)
    if job is None or job.status != Status.QUEUED:
        return
    attempt = await jobs.live_attempt(job_id)
    if attempt is not None:
        # A queued job has none; whoever runs it is refused from now on.
        await AttemptRepository(session).end(
            attempt, outcome="failed", reason=Reason.INTERNAL_ERROR, detail=why
        )
    await transitions.apply(
        session,
        job,
        Status.FAILED,
        Actor.SCHEDULER,
        message="What is stored of the job is damaged; it cannot be placed.",
        reason=Reason.INTERNAL_ERROR,
        detail=f"What is stored of the job is damaged, so it cannot be placed: {why}. Submit it "
        "again.",
    )
    log.error("job %s is ended, its row is damaged: %s", job_id, why)
