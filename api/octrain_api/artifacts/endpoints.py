"""Artifacts over HTTP."""

from pathlib import Path, PurePosixPath
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse, Response, StreamingResponse

from octrain_api.artifacts.schemas import ArtifactList, ConversionReport, PrecisionTable
from octrain_api.artifacts.service import ArtifactService
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.jobs.access import VisibleJob

router = APIRouter(prefix="/jobs", tags=["artifacts"])

_BINARY = "application/octet-stream"


@router.get("/{job_id}/artifacts")
async def list_artifacts(
    job: VisibleJob,
    session: SessionDep,
    context: ContextDep,
    kind: Annotated[str | None, Query(max_length=64, pattern=r"^[a-z_]*$")] = None,
) -> ArtifactList:
    """Checkpoints, models and reports of the job, oldest first."""
    return ArtifactList(
        items=await ArtifactService(session, context.settings).list_of(job.id, kind)
    )


@router.get(
    "/{job_id}/artifacts/{artifact_id}/files/{path:path}",
    response_class=Response,
    responses={200: {"content": {_BINARY: {}}, "description": "The file's bytes"}},
)
async def download_file(
    job: VisibleJob, artifact_id: str, path: str, session: SessionDep, context: ContextDep
) -> Response:
    """One file of an artifact. Its sha256 is the ETag."""
    service = ArtifactService(session, context.settings)
    row, content = await service.file(job.id, artifact_id, path)
    headers = {"ETag": f'"{row["sha256"]}"', "X-Content-Type-Options": "nosniff"}
    name = PurePosixPath(path).name
    if isinstance(content, Path):
        return FileResponse(content, filename=name, media_type=_BINARY, headers=headers)
    headers["Content-Length"] = str(row["size"])
    return StreamingResponse(content, media_type=_BINARY, headers=headers)


@router.get("/{job_id}/conversion")
async def get_conversion(
    job: VisibleJob, session: SessionDep, context: ContextDep
) -> ConversionReport:
    """What the newest attempt converted, what it kept, and why."""
    return await ArtifactService(session, context.settings).conversion(job.id)


@router.get("/{job_id}/precision")
async def get_precision(
    job: VisibleJob, session: SessionDep, context: ContextDep
) -> PrecisionTable:
    """Formats and bytes of GEMM compute, communication, weights, gradients and states, measured."""
    return await ArtifactService(session, context.settings).precision(job.id)
