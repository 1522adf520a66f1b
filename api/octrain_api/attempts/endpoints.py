"""The worker protocol over HTTP."""

from fastapi import APIRouter

from octrain_api.attempts.body import TELEMETRY_BODY, TelemetryBody
from octrain_api.attempts.schemas import (
    ArtifactAnswer,
    ArtifactRequest,
    Claim,
    ClaimRequest,
    FinishAnswer,
    FinishRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    TelemetryAnswer,
)
from octrain_api.attempts.service import AttemptService
from octrain_api.auth import NodeWorker
from octrain_api.dependencies import Context, ContextDep, SessionDep

router = APIRouter(prefix="/attempts", tags=["workers"])


def _trace(context: Context, service: AttemptService) -> None:
    if service.traced is not None:
        context.tracing.record(*service.traced)


@router.post("/{attempt_id}/claim")
async def claim_attempt(
    attempt_id: str,
    body: ClaimRequest,
    session: SessionDep,
    context: ContextDep,
    principal: NodeWorker,
) -> Claim:
    """Take a placed attempt, once: a second supervisor gets 409."""
    service = AttemptService(session, context.settings, principal.node)
    answer = await service.claim(attempt_id, body)
    _trace(context, service)
    return answer


@router.post("/{attempt_id}/heartbeat")
async def heartbeat_attempt(
    attempt_id: str,
    body: HeartbeatRequest,
    session: SessionDep,
    context: ContextDep,
    principal: NodeWorker,
) -> HeartbeatAnswer:
    """Renew the lease; the answer says what is wanted."""
    service = AttemptService(session, context.settings, principal.node)
    answer = await service.heartbeat(attempt_id, body)
    _trace(context, service)
    return answer


@router.post("/{attempt_id}/telemetry", openapi_extra=TELEMETRY_BODY)
async def send_telemetry(
    attempt_id: str,
    batch: TelemetryBody,
    session: SessionDep,
    context: ContextDep,
    principal: NodeWorker,
) -> TelemetryAnswer:
    """Store a batch of records, each exactly once; a gap gets 409 with `expected_seq`.

    The answer says what is wanted, as that of a heartbeat does, but renews no lease.
    """
    service = AttemptService(session, context.settings, principal.node)
    answer = await service.telemetry(attempt_id, batch)
    _trace(context, service)
    context.measures.telemetry_batches.inc()
    context.measures.telemetry_records.inc(batch.count)
    return answer


@router.post("/{attempt_id}/artifacts")
async def register_artifact(
    attempt_id: str,
    body: ArtifactRequest,
    session: SessionDep,
    context: ContextDep,
    principal: NodeWorker,
) -> ArtifactAnswer:
    """Register files that lie complete in the store; idempotent by (attempt, kind, name)."""
    service = AttemptService(session, context.settings, principal.node)
    return ArtifactAnswer(artifact_id=await service.register_artifact(attempt_id, body))


@router.post("/{attempt_id}/finish")
async def finish_attempt(
    attempt_id: str,
    body: FinishRequest,
    session: SessionDep,
    context: ContextDep,
    principal: NodeWorker,
) -> FinishAnswer:
    """End the attempt; the same report again gets the same answer."""
    service = AttemptService(session, context.settings, principal.node)
    return FinishAnswer(job_status=await service.finish(attempt_id, body))
