"""The worker protocol: every write after the claim is guarded by the attempt's fencing token."""

from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec.outcomes import Reason
from octrain_api.artifacts.repository import ArtifactRepository
from octrain_api.artifacts.retention import prune_checkpoints
from octrain_api.artifacts.store import check_registration
from octrain_api.attempts.body import Batch
from octrain_api.attempts.progress import follow_checkpoint, note_progress
from octrain_api.attempts.repository import AttemptRepository, artifact_prefix
from octrain_api.attempts.schemas import (
    ArtifactRequest,
    Claim,
    ClaimRequest,
    DatasetFrom,
    FinishRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    ModelFrom,
    ResumeFrom,
    TelemetryAnswer,
    Wanted,
)
from octrain_api.attempts.telemetry import TelemetryWriter
from octrain_api.clocks import api_was_away_since
from octrain_api.database import database_now
from octrain_api.datasets.places import content_name, folder_url
from octrain_api.datasets.repository import DatasetRepository
from octrain_api.events.repository import EventRepository
from octrain_api.ids import new_id
from octrain_api.jobs import endings, limits
from octrain_api.jobs.checks import own_root_texts
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.transitions import Actor, Status
from octrain_api.listener import notify_job
from octrain_api.models import Artifact, Attempt, Job
from octrain_api.nodes.repository import NodeRepository
from octrain_api.numbers import clean_text
from octrain_api.observability.tracing import job_attributes
from octrain_api.problems import Problem, conflict, not_found
from octrain_api.settings import Settings

# How many checkpoints a claim offers: each is tried only when those before it are damaged.
_MAX_CANDIDATES = 10
_WANTED: dict[str, Wanted] = {Status.PAUSING: "pause", Status.CANCELLING: "cancel"}


def wanted_of(job: Job) -> Wanted:
    """What the job's state asks of its live attempt."""
    return _WANTED.get(job.status, "run")


def _stale(detail: str, **extra: Any) -> Problem:
    return conflict("stale-attempt", detail, **extra)


class AttemptService:
    """Claims, heartbeats, telemetry, artifacts and the finish of attempts on one node.

    To any other node, and to a key that has registered none, an attempt is not there.
    """

    def __init__(self, session: AsyncSession, settings: Settings, node: str | None) -> None:
        self._session = session
        self._settings = settings
        self._node = node
        self._attempts = AttemptRepository(session)
        self._jobs = JobRepository(session)
        # A span to be recorded: name, parent, begin, attributes.
        self.traced: tuple[str, str | None, datetime, dict[str, Any]] | None = None

    async def _lock(self, attempt_id: str) -> tuple[Job, Attempt]:
        job_id = await self._attempts.job_id_of(attempt_id, self._node)
        if job_id is None:
            raise not_found("attempt", attempt_id)
        job = await self._jobs.lock(job_id)
        if job is None:
            raise _stale("The job of this attempt has been deleted; nothing is written to it.")
        return job, await self._attempts.lock(attempt_id)

    async def _lock_fenced(self, attempt_id: str, token: int) -> tuple[Job, Attempt]:
        """The locked rows, if the token is that of the claim and the attempt lives."""
        job, attempt = await self._lock(attempt_id)
        self._check_token(attempt, token)
        if attempt.status == "ended":
            raise _stale(
                f"Attempt {attempt.number} has ended ({attempt.reason}); nothing is written to it.",
                attempt_status=attempt.status,
            )
        return job, attempt

    @staticmethod
    def _check_token(attempt: Attempt, token: int) -> None:
        if attempt.claimed_at is None or attempt.fencing_token != token:
            raise _stale("The fencing token is not that of this attempt's claim.")

    async def claim(self, attempt_id: str, request: ClaimRequest) -> Claim:
        """Give the attempt to the first supervisor that asks; the same one may ask again."""
        job, attempt = await self._lock(attempt_id)
        if attempt.node_id != request.node_id:
            raise _stale("This attempt was placed on another node.")
        if attempt.status == "ended":
            raise _stale(f"Attempt {attempt.number} has ended ({attempt.reason}).")
        supervisor = clean_text(request.supervisor)
        if attempt.claimed_at is not None and attempt.supervisor != supervisor:
            raise _stale("Another supervisor has claimed this attempt.")
        if attempt.claimed_at is None:
            self.traced = ("claim", job.traceparent, attempt.created_at, _of(job, attempt))
            await self._attempts.claim(attempt, supervisor, limits.max_run_time(job))
            await self._attempts.forget_message(attempt.id)
            job.avoid_nodes = []
            node = await NodeRepository(self._session).get(attempt.node_id)
            await EventRepository(self._session).append(
                job,
                kind="claimed",
                actor=Actor.SUPERVISOR,
                message=f"Node {node.name if node else attempt.node_id} took the attempt.",
                attempt=attempt.number,
                data={"attempt_id": attempt.id, "node_id": attempt.node_id},
            )
            lease = attempt.lease_seconds
        else:
            # It counts its lease from this answer: the one before may not have reached it.
            lease = await self._heard(job, attempt)
        checkpoints = await self._attempts.newest_checkpoints(job.id, _MAX_CANDIDATES)
        candidates = [_resume_from(checkpoint) for checkpoint in checkpoints]
        return Claim(
            attempt_id=attempt.id,
            job_id=job.id,
            attempt=attempt.number,
            fencing_token=attempt.fencing_token,
            spec=job.spec,
            **await self._wish(job),
            lease_seconds=lease,
            lease_number=attempt.lease_number,
            heartbeat_interval_seconds=self._settings.controller.heartbeat_interval,
            artifact_prefix=artifact_prefix(attempt),
            resume_from=candidates[0] if candidates else None,
            resume_candidates=candidates,
            model_from=await self._model_from(job.spec["model"]),
            dataset_from=await self._dataset_from(job),
            device=attempt.device,
            gpu_indices=attempt.gpu_indices,
            traceparent=job.traceparent,
            roots=own_root_texts(self._settings.storage, job.owner),
        )

    async def _model_from(self, model: dict[str, Any]) -> ModelFrom | None:
        if model["source"] != "job":
            return None
        # Whether the job's owner may have it was decided when the job was taken.
        artifacts = ArtifactRepository(self._session)
        found = await artifacts.model_of(model["job"], model["checkpoint"])
        return ModelFrom(job=model["job"], url=found.url, files=found.files) if found else None

    async def _dataset_from(self, job: Job) -> DatasetFrom | None:
        data = job.spec["data"]
        if data["source"] != "upload":
            return None
        found = await DatasetRepository(self._session).get(data["dataset"], job.owner)
        if found is None or found.status != "ready":
            return None
        return DatasetFrom(
            dataset=found.id,
            url=folder_url(self._settings.storage.artifact_url, found),
            path=content_name(found),
            size=found.size,
            sha256=data["sha256"],
        )

    async def heartbeat(self, attempt_id: str, request: HeartbeatRequest) -> HeartbeatAnswer:
        """Renew the lease and say what is wanted."""
        job, attempt = await self._lock_fenced(attempt_id, request.fencing_token)
        lease = await self._heard(job, attempt, request.lease_number)
        phase = clean_text(request.phase) if request.phase is not None else attempt.phase
        step = request.step if request.step is not None else attempt.step
        if (phase, step) != (attempt.phase, attempt.step):
            before, attempt.phase, attempt.step = attempt.step, phase, step
            self._trace_first_step(job, attempt, before)
            job.version += 1
            await notify_job(self._session, job.id)
            await note_progress(self._session, job, attempt)
        return HeartbeatAnswer(
            **await self._wish(job),
            lease_seconds=lease,
            lease_number=attempt.lease_number,
        )

    async def _heard(self, job: Job, attempt: Attempt, held: int | None = None) -> int:
        """The attempt's supervisor asks, holding this lease: renew it; how many seconds it has."""
        if attempt.unreachable_since is not None:
            await EventRepository(self._session).append(
                job,
                kind="node_reachable",
                actor=Actor.SUPERVISOR,
                message="The supervisor is heard again.",
                attempt=attempt.number,
            )
        await self._note_silence(attempt)
        forced_lease = self._settings.controller.forced_lease
        return await self._attempts.renew(attempt, job, forced_lease, held)

    def _trace_first_step(self, job: Job, attempt: Attempt, before: int | None) -> None:
        if not before and attempt.step and attempt.claimed_at is not None:
            self.traced = ("first step", job.traceparent, attempt.claimed_at, _of(job, attempt))

    async def _wish(self, job: Job) -> dict[str, Any]:
        """What is wanted, why, and the seconds that a stop still has: 0 when they are over."""
        left = None
        if job.stop_deadline_at is not None:
            span = job.stop_deadline_at - await database_now(self._session)
            left = max(span.total_seconds(), 0.0)
        return {
            "wanted": wanted_of(job),
            "wanted_reason": job.reason,
            "stop_within_seconds": left,
        }

    async def _note_silence(self, attempt: Attempt) -> None:
        """The supervisor is heard: if it was not for so long that it has given up its lease
        meanwhile, note whether that was for an outage of the API."""
        if attempt.last_heartbeat_at is None:
            return
        now = await database_now(self._session)
        if now - attempt.last_heartbeat_at < endings.shortest_fatal_silence(attempt):
            return
        tolerance = self._settings.controller.downtime_tolerance
        away = await api_was_away_since(self._session, attempt.last_heartbeat_at, tolerance)
        attempt.outage_at = now if away else None

    async def telemetry(self, attempt_id: str, batch: Batch) -> TelemetryAnswer:
        """Store each record exactly once; the number of the last one stored."""
        job, attempt = await self._lock_fenced(attempt_id, batch.fencing_token)
        expected = attempt.acknowledged_seq + 1
        if batch.first_seq > expected:
            raise conflict(
                "sequence-gap",
                f"Records {expected} to {batch.first_seq - 1} are missing.",
                expected_seq=expected,
            )
        new = batch.after(expected - batch.first_seq)
        if new.count:
            before = attempt.step
            attempt.acknowledged_seq += new.count
            await TelemetryWriter(self._session, job, attempt).write(new)
            self._trace_first_step(job, attempt, before)
        return TelemetryAnswer(acknowledged_seq=attempt.acknowledged_seq, **await self._wish(job))

    async def register_artifact(self, attempt_id: str, request: ArtifactRequest) -> str:
        """Register files in the store; the same name again gives the same artifact."""
        job, attempt = await self._lock_fenced(attempt_id, request.fencing_token)
        known = await self._attempts.find_artifact(attempt.id, request.kind, request.name)
        if known is not None:
            return known.id
        node = await NodeRepository(self._session).get(attempt.node_id)
        check_registration(
            request.url,
            [file.path for file in request.files],
            stores=[self._settings.storage.artifact_url, (node.artifact_url or "") if node else ""],
            prefix=artifact_prefix(attempt),
        )
        artifact = Artifact(
            id=new_id("art"),
            job_id=job.id,
            attempt_id=attempt.id,
            attempt=attempt.number,
            kind=request.kind,
            name=clean_text(request.name),
            step=request.step,
            best=request.best,
            metric=request.metric,
            url=request.url,
            size=sum(file.size for file in request.files),
            files=[file.model_dump() for file in request.files],
        )
        await self._attempts.add_artifact(artifact)
        if artifact.kind == "checkpoint":
            await follow_checkpoint(self._session, job)
        await EventRepository(self._session).append(
            job,
            kind="artifact",
            actor=Actor.SUPERVISOR,
            message=f"Registered {artifact.kind} {artifact.name!r}.",
            attempt=attempt.number,
            data={
                "artifact_id": artifact.id,
                "kind": artifact.kind,
                "name": artifact.name,
                "step": artifact.step,
                "size": artifact.size,
                "best": artifact.best,
            },
        )
        if artifact.kind == "checkpoint":
            await prune_checkpoints(self._session, job)
        return artifact.id

    async def finish(self, attempt_id: str, request: FinishRequest) -> str:
        """End the attempt and move the job on; the job's status after it."""
        job, attempt = await self._lock(attempt_id)
        self._check_token(attempt, request.fencing_token)
        report = request.model_dump(mode="json", exclude={"fencing_token"})
        report["detail"] = clean_text(report["detail"]) if report["detail"] is not None else None
        if attempt.status == "ended":
            if attempt.finish_report == report:
                return job.status
            raise _stale(f"Attempt {attempt.number} has ended ({attempt.reason}).")
        attempt.finish_report = report
        if request.step is not None:
            attempt.step = request.step
        if request.reason == Reason.WORKER_LOST:
            await self._note_silence(attempt)
        await self._attempts.end(
            attempt,
            outcome=request.outcome,
            reason=request.reason,
            detail=report["detail"],
            exit_code=request.exit_code,
        )
        await endings.after_finish(
            self._session,
            self._settings.scheduler,
            job,
            attempt,
            request.outcome,
            request.resumable,
        )
        return job.status


def _of(job: Job, attempt: Attempt) -> dict[str, Any]:
    return job_attributes(job.id, attempt)


def _resume_from(checkpoint: Artifact) -> ResumeFrom:
    assert checkpoint.step is not None
    return ResumeFrom(
        artifact_id=checkpoint.id,
        step=checkpoint.step,
        url=checkpoint.url,
        manifest={"complete": True, "step": checkpoint.step, "files": checkpoint.files},
    )
