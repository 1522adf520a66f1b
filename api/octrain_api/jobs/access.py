"""The job of a path, as far as the key may see it."""

from typing import Annotated

from fastapi import Depends

from octrain_api.auth import Reader
from octrain_api.dependencies import SessionDep
from octrain_api.jobs.repository import JobRepository
from octrain_api.models import Job
from octrain_api.problems import not_found


async def _visible_job(job_id: str, session: SessionDep, principal: Reader) -> Job:
    job = await JobRepository(session).head(job_id, principal.visible_owner)
    if job is None:
        raise not_found("job", job_id)
    return job


async def _visible_whole(job_id: str, session: SessionDep, principal: Reader) -> Job:
    job = await JobRepository(session).get(job_id, principal.visible_owner)
    if job is None:
        raise not_found("job", job_id)
    return job


async def _visible_trail(job_id: str, session: SessionDep, principal: Reader) -> Job:
    job = await JobRepository(session).trail(job_id, principal.visible_owner)
    if job is None:
        raise not_found("job", job_id)
    return job


# A job, or what is left of it once it is deleted.
VisibleTrail = Annotated[Job, Depends(_visible_trail)]
# Without its spec and its latest metrics; with them.
VisibleJob = Annotated[Job, Depends(_visible_job)]
VisibleWholeJob = Annotated[Job, Depends(_visible_whole)]
