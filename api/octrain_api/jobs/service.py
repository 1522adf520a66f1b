"""What users do with jobs: submit, cancel, pause, resume."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec import SpecInvalid, parse_spec
from octrain_api.artifacts.repository import ArtifactRepository
from octrain_api.attempts.repository import AttemptRepository
from octrain_api.auth import Principal
from octrain_api.controller.placement import need_of, never_fits
from octrain_api.database import psycopg_of
from octrain_api.datasets.service import DatasetService
from octrain_api.events.repository import EventRepository
from octrain_api.idempotency.once import Once, in_flight
from octrain_api.ids import new_id
from octrain_api.jobs import transitions
from octrain_api.jobs.checks import (
    check_files,
    check_secrets,
    names_files,
    narrowed,
    own_root_texts,
)
from octrain_api.jobs.given import as_given
from octrain_api.jobs.refusals import wrong_status
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.rows import JobRow, JobRows
from octrain_api.jobs.submission import FirstEvent, NewJob, Submission, Unless, store
from octrain_api.jobs.together import StoredTogether
from octrain_api.jobs.transitions import FINAL, Actor, Status
from octrain_api.listener import JOB_CHANNEL, QUEUE_CHANNEL, tell_after_commit
from octrain_api.models import Attempt, Job, Node
from octrain_api.nodes.repository import NodeRepository
from octrain_api.observability.context import current_traceparent
from octrain_api.problems import Problem, ProblemError, conflict, not_found
from octrain_api.recipes.service import RecipeService
from octrain_api.settings import Settings
from octrain_api.usage.service import UsageService


def _invalid(errors: list[ProblemError]) -> Problem:
    detail = errors[0].message if len(errors) == 1 else f"{len(errors)} things are wrong."
    return Problem(422, "spec-invalid", "The job's spec is not valid", detail, errors=errors)


class JobService:
    """One owner's jobs, or every owner's for an administrator."""

    def __init__(self, session: AsyncSession, settings: Settings, principal: Principal) -> None:
        self._session = session
        self._settings = settings
        self._principal = principal
        self._jobs = JobRepository(session)
        self._attempts = AttemptRepository(session)

    async def get(self, job_id: str) -> JobRow:
        """One job, as this session sees it."""
        found = await JobRows(await psycopg_of(self._session)).get(job_id)
        if found is None or not self._principal.sees(found.owner):
            raise not_found("job", job_id)
        return found

    async def submit(
        self,
        body: dict[str, Any],
        once: Once,
        allow_waiting: bool,
        *,
        given: dict[str, Any] | None,
        draft: bool = False,
        also: Sequence[FirstEvent] = (),
        entry: dict[str, Any] | None = None,
        together: StoredTogether | None = None,
    ) -> JobRow:
        """Check and store a job; or the one that this request made before, by its key.

        `given` is what of the body was written by the user, or None where that is not known. A
        draft waits for its start. `also` are events beside the first one, `entry` is that of the
        audit log. Where `together` is given and nothing was asked of the database before, the job
        is stored by that, with others: by one statement, which is a transaction.
        """
        try:
            made_before = await self._judge_default_quotas(once, draft)
            if made_before is not None:
                return await self.get(made_before)
            spec, recipe_from = await self.check(body, allow_waiting=True)
        except Problem:
            # What this request made before is told, whatever would be said of it today.
            made_before = await once.earlier()
            if made_before is None:
                raise
            return await self.get(made_before)
        job = self._new_job(
            spec,
            as_given(given) if given is not None else None,
            recipe_from,
            Status.DRAFT if draft else Status.QUEUED,
        )
        moved = {"from": None, "to": job.status.value, "reason": None, "detail": None}
        first = FirstEvent("status", "Drafted." if draft else "Submitted.", moved)
        unless = Unless(owner_has_quotas=not draft, no_node_fits=not allow_waiting)
        asked = Submission(job, (first, *also), self._who, once.kept, entry, unless)
        if together is None or self._session.in_transaction():
            [stored] = await store(await psycopg_of(self._session), [asked])
        else:
            stored = await together.store(asked)
        made_before = once.judge(stored.claim)
        if made_before is not None:
            return await self.get(made_before)
        if stored.is_refused:
            # Seldom; so only now is it asked what it is, and how to say it.
            if not draft:
                await self.admit(job.owner)
            if not allow_waiting:
                await self._check_capable(spec)
            asked = replace(asked, unless=Unless())
            [stored] = await store(await psycopg_of(self._session), [asked])
        if stored.row is None:
            raise in_flight()
        tell_after_commit(self._session, JOB_CHANNEL, job.id)
        if not draft:
            tell_after_commit(self._session, QUEUE_CHANNEL, "")
        return stored.row

    async def _judge_default_quotas(self, once: Once, draft: bool) -> str | None:
        """Where every owner has quotas they are judged first: 403, unless the job is there."""
        quotas = UsageService(self._session, self._settings.quotas)
        if draft or not quotas.have_default:
            return None
        made_before = await once.earlier()
        if made_before is None:
            await quotas.check_submission(self._principal.owner)
        return made_before

    def _new_job(
        self,
        spec: dict[str, Any],
        given: dict[str, Any] | None,
        recipe_from: dict[str, Any] | None,
        status: Status,
    ) -> NewJob:
        return NewJob(
            id=new_id("job"),
            owner=self._principal.owner,
            spec=spec,
            given=given,
            recipe_from=recipe_from,
            status=status,
            need=need_of(spec),
            traceparent=current_traceparent(),
        )

    async def admit(self, owner: str) -> None:
        """Refuse one more job in the queue of an owner who may have no more (403)."""
        await UsageService(self._session, self._settings.quotas).check_submission(owner)

    @property
    def _who(self) -> str:
        return f"user:{self._principal.owner}"

    async def check(
        self, body: dict[str, Any], allow_waiting: bool
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The resolved spec and the named recipe it was made with; 422 with every problem found."""
        body, recipe_from = await RecipeService(self._session, self._principal).expand(body)
        spec = self.resolve(body)
        errors = await self._check_model(spec["model"])
        owner = self._principal.owner
        errors += check_secrets(spec, lambda name: self._settings.secrets.allows(name, owner))
        if spec["data"]["source"] == "upload":
            datasets = DatasetService(self._session, self._settings.datasets, self._principal)
            errors += await datasets.pin(spec["data"])
        if names_files(spec):
            errors += await self._check_files(spec)
        if errors:
            raise _invalid(errors)
        if not allow_waiting:
            await self._check_capable(spec)
        return spec, recipe_from

    async def _nodes(self) -> list[Node]:
        ttl = self._settings.controller.heartbeat_ttl
        return [node for node, _ in await NodeRepository(self._session).all_with_liveness(ttl)]

    async def _check_files(self, spec: dict[str, Any]) -> list[ProblemError]:
        storage, owner = self._settings.storage, self._principal.owner
        node_roots = [root for node in await self._nodes() for root in node.roots]
        return await asyncio.to_thread(
            check_files,
            spec,
            storage.roots_of(owner),
            narrowed(node_roots, own_root_texts(storage, owner)),
            storage.data_check_bytes,
        )

    @staticmethod
    def resolve(body: dict[str, Any]) -> dict[str, Any]:
        """The spec with every default, judged by itself alone; 422 with every problem found."""
        try:
            return parse_spec(body).resolved()
        except SpecInvalid as error:
            raise _invalid(
                [
                    ProblemError(
                        pointer=p.pointer, message=p.message, code=p.code, suggestion=p.suggestion
                    )
                    for p in error.problems
                ]
            ) from error

    async def _check_model(self, model: dict[str, Any]) -> list[ProblemError]:
        """Whether the job that the model comes from is the caller's and has that model."""
        if model["source"] != "job":
            return []
        job = await self._jobs.get(model["job"], self._principal.visible_owner)
        if job is None:
            message = f"there is no job {model['job']!r}"
            return [ProblemError(pointer="/model/job", message=message, code="not_found")]
        wanted = model["checkpoint"]
        if await ArtifactRepository(self._session).model_of(job.id, wanted) is not None:
            return []
        what = "exported model" if wanted == "model" else f"checkpoint {wanted!r}"
        message = f"job {job.id} is {job.status} and has no {what}"
        return [ProblemError(pointer="/model/checkpoint", message=message, code="not_found")]

    async def _check_capable(self, spec: dict[str, Any]) -> None:
        refusals = never_fits(spec, await self._nodes())
        if refusals is not None:
            raise Problem(
                422,
                "no-capable-node",
                "No registered node can run this job",
                "; ".join(refusals) + ". Send ?allow_waiting=true to queue it all the same.",
                errors=[
                    ProblemError(pointer="/resources", message=message, code="no_capable_node")
                    for message in refusals
                ],
            )

    async def _lock(self, job_id: str) -> tuple[Job, Attempt | None]:
        job = await self._jobs.lock(job_id, self._principal.visible_owner)
        if job is None:
            raise not_found("job", job_id)
        return job, await self._jobs.live_attempt(job.id)

    async def cancel(self, job_id: str) -> Job:
        """Ask for the end of a job. Asking again, or after the end, changes nothing."""
        job, attempt = await self._lock(job_id)
        if job.status in FINAL or job.status == Status.CANCELLING:
            return job
        if attempt is not None and attempt.claimed_at is not None:
            await self._move(job, Status.CANCELLING, "Cancel was asked for.", attempt=attempt)
            return job
        await self._end_unclaimed(attempt, "cancelled_by_user")
        await self._move(job, Status.CANCELLED, "Cancelled.", reason="cancelled_by_user")
        return job

    async def pause(self, job_id: str) -> Job:
        """Ask for a checkpoint and the release of the node. Asking again changes nothing."""
        job, attempt = await self._lock(job_id)
        if job.status == Status.PAUSING and job.reason is not None:
            await self._keep_paused(job)
        if job.status in (Status.PAUSING, Status.PAUSED):
            return job
        if attempt is not None and attempt.claimed_at is not None:
            await self._move(job, Status.PAUSING, "Pause was asked for.", attempt=attempt)
            return job
        if job.status not in FINAL:
            await self._end_unclaimed(attempt, "stopped_by_request")
        await self._move(job, Status.PAUSED, "Paused.")
        return job

    async def resume(self, job_id: str) -> Job:
        """Put a paused job back into the queue. A job that is queued or at work stays as it is."""
        job, _ = await self._lock(job_id)
        if job.status in (Status.QUEUED, Status.STARTING, Status.RUNNING):
            return job
        if job.status == Status.DRAFT:
            raise conflict("wrong-status", "The job is a draft: start it.", job_status=job.status)
        await self._move(job, Status.QUEUED, "Resumed.")
        return job

    async def _keep_paused(self, job: Job) -> None:
        """The service is stopping the job only to queue it again; the user wants it to stay."""
        why, job.reason, job.detail = job.reason, None, None
        await EventRepository(self._session).append(
            job,
            kind="pause",
            actor=self._who,
            message="Pause was asked for while the job was being stopped; it will stay paused.",
            attempt=job.attempt,
            data={"instead_of": why},
        )

    async def _end_unclaimed(self, attempt: Attempt | None, reason: str) -> None:
        if attempt is not None:
            await self._attempts.end(attempt, outcome="stopped", reason=reason)

    async def _move(
        self,
        job: Job,
        to: Status,
        message: str,
        *,
        attempt: Attempt | None = None,
        reason: str | None = None,
    ) -> None:
        try:
            await transitions.apply(
                self._session,
                job,
                to,
                Actor.USER,
                message=message,
                attempt=attempt,
                reason=reason,
                who=self._who,
            )
        except transitions.TransitionRefused as error:
            raise wrong_status(job, error) from error
