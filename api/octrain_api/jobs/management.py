"""What owners do with jobs beside running them: change, clone, start, delete, cancel many."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.auth import Principal
from octrain_api.controller.placement import need_of
from octrain_api.events.repository import EventRepository
from octrain_api.idempotency.once import Once
from octrain_api.jobs import transitions
from octrain_api.jobs.deletion import remove_contents
from octrain_api.jobs.given import as_given, given_with
from octrain_api.jobs.overrides import overridden
from octrain_api.jobs.refusals import wrong_status
from octrain_api.jobs.repository import JobFilter, JobRepository
from octrain_api.jobs.rows import JobRow
from octrain_api.jobs.schemas import JobChanges
from octrain_api.jobs.service import JobService
from octrain_api.jobs.submission import FirstEvent
from octrain_api.jobs.transitions import FINAL, Actor, Status
from octrain_api.listener import notify_queue
from octrain_api.merge_patch import merge_patch
from octrain_api.models import Job
from octrain_api.problems import Problem, conflict, not_found
from octrain_api.settings import Settings

# Cancelled by one request; the caller asks again for more.
MOST_AT_ONCE = 500
# Files of a deleted job may be being read.
_STORE_AFTER = timedelta(minutes=1)


@dataclass(frozen=True)
class Cancelled:
    """What became of one job that was to be cancelled."""

    job_id: str
    status: str | None
    problem: str | None


class JobManager:
    """One owner's jobs, or every owner's for an administrator."""

    def __init__(self, session: AsyncSession, settings: Settings, principal: Principal) -> None:
        self._session = session
        self._jobs = JobRepository(session)
        self._principal = principal
        self._service = JobService(session, settings, principal)
        self._who = f"user:{principal.owner}"

    async def change(self, job_id: str, changes: JobChanges) -> Job:
        """Change name, labels, notes, or priority; of a draft its spec too.

        Labels are merged (null removes one). Priority counts while the job waits; of a job at
        work it takes effect should it be queued again.
        """
        job = await self._lock(job_id)
        await self._jobs.read_given(job)
        fields = changes.model_fields_set
        if "spec" in fields:
            if job.status != Status.DRAFT:
                raise conflict(
                    "wrong-status",
                    f"The spec of a job that is {job.status} stays as it is; clone the job.",
                    job_status=job.status,
                )
            given = given_with(job.spec_given, job.spec, changes.spec)
            await self._respecify(job, overridden(job.spec, changes.spec))
            job.spec_given = as_given(given) if given is not None else None
        patch: dict[str, Any] = {}
        for name in ("name", "notes", "priority"):
            if name in fields:
                patch[name] = getattr(changes, name)
        if "labels" in fields:
            patch["labels"] = merge_patch(job.spec["labels"], changes.labels)
        if patch:
            await self._respecify(job, {**job.spec, **patch}, checks=False)
            if job.spec_given is not None:
                job.spec_given = {**job.spec_given, **patch}
        if fields:
            await EventRepository(self._session).append(
                job,
                kind="changed",
                actor=self._who,
                message=f"Changed: {', '.join(sorted(fields))}.",
                attempt=job.attempt or None,
                data={"fields": sorted(fields)},
            )
            if job.status == Status.QUEUED:
                await notify_queue(self._session)
        return job

    async def clone(
        self,
        job_id: str,
        overrides: dict[str, Any],
        once: Once,
        *,
        entry: dict[str, Any] | None,
        allow_waiting: bool,
        draft: bool,
    ) -> JobRow:
        """A new job of the same spec with `overrides` over it (RFC 7396)."""
        source = await self._jobs.get(job_id, self._principal.visible_owner)
        if source is None:
            raise not_found("job", job_id)
        await self._jobs.read_given(source)
        cloned = FirstEvent("cloned", f"A clone of {source.id}.", {"from_job": source.id})
        spec = overridden(source.spec, overrides)
        given = given_with(source.spec_given, source.spec, overrides)
        return await self._service.submit(
            spec, once, allow_waiting, given=given, draft=draft, also=[cloned], entry=entry
        )

    async def start(self, job_id: str, *, allow_waiting: bool) -> Job:
        """Queue a draft; it is checked again, since files and nodes may have changed."""
        job = await self._lock(job_id)
        if job.status in (Status.QUEUED, Status.STARTING, Status.RUNNING):
            return job
        if job.status == Status.DRAFT:
            await self._service.admit(job.owner)
            await self._respecify(job, job.spec, allow_waiting=allow_waiting)
        try:
            await transitions.apply(
                self._session,
                job,
                Status.QUEUED,
                Actor.USER,
                message="Started." if job.status == Status.DRAFT else "Resumed.",
                who=self._who,
            )
        except transitions.TransitionRefused as error:
            raise wrong_status(job, error) from error
        return job

    async def cancel_many(
        self, ids: Sequence[str] | None, job_filter: JobFilter | None
    ) -> list[Cancelled]:
        """Cancel these jobs, or those that the filter finds, at most 500 at a time."""
        if ids is None:
            assert job_filter is not None
            unfinished = tuple(s.value for s in Status if s not in FINAL)
            statuses = tuple(s for s in job_filter.statuses or unfinished if s in unfinished)
            narrowed = JobFilter(statuses, job_filter.labels, job_filter.name)
            owner = self._principal.visible_owner
            ids = await self._jobs.ids(owner, narrowed, MOST_AT_ONCE) if statuses else []
        results = []
        # In the order of ids, like everybody who locks several jobs.
        for job_id in sorted(set(ids)):
            try:
                job = await self._service.cancel(job_id)
            except Problem as problem:
                if problem.status not in (404, 409):
                    raise
                results.append(Cancelled(job_id, None, problem.detail))
            else:
                results.append(Cancelled(job_id, job.status, None))
        return results

    async def delete(self, job_id: str) -> None:
        """Remove what an ended job stored; its events stay, as the trail of what was done."""
        job = await self._lock(job_id)
        if job.status not in FINAL and job.status != Status.DRAFT:
            raise conflict(
                "wrong-status",
                f"The job is {job.status}; cancel it first, and delete it once it has ended.",
                job_status=job.status,
            )
        user = await self._jobs.using_model_of(job.id)
        if user is not None:
            raise conflict(
                "job-in-use",
                f"Job {user} begins with the model of this one and has not ended.",
                job_id=user,
            )
        await EventRepository(self._session).append(
            job,
            kind="deleted",
            actor=self._who,
            message="Deleted: spec, metrics, logs and artifacts are removed; the events stay.",
            attempt=job.attempt or None,
            data={},
        )
        await remove_contents(self._session, job, _STORE_AFTER)

    async def _lock(self, job_id: str) -> Job:
        job = await self._jobs.lock(job_id, self._principal.visible_owner)
        if job is None:
            raise not_found("job", job_id)
        return job

    async def _respecify(
        self,
        job: Job,
        body: dict[str, Any],
        *,
        checks: bool = True,
        allow_waiting: bool = True,
    ) -> None:
        """Give the job this spec, checked; without `checks` only the spec itself is."""
        if checks:
            spec, recipe_from = await self._service.check(body, allow_waiting)
            job.recipe_from = recipe_from or job.recipe_from
        else:
            spec = self._service.resolve(body)
        job.spec = spec
        job.name, job.notes = spec["name"], spec["notes"]
        job.labels, job.priority = spec["labels"], spec["priority"]
        job.total_steps = spec["training"]["steps"]
        if job.status == Status.DRAFT:
            job.need = str(need_of(spec))
        await self._session.flush()
