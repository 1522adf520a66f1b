"""Artifacts over HTTP."""

from pathlib import Path, PurePosixPath
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import FileResponse, Response, StreamingResponse

from octrain_api.artifacts.archive import parse_range
from octrain_api.artifacts.schemas import ArtifactList, ConversionReport, PrecisionTable
from octrain_api.artifacts.service import ArtifactService
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.jobs.access import VisibleJob, VisibleWholeJob
from octrain_api.problems import Problem

router = APIRouter(prefix="/jobs", tags=["artifacts"])

_BINARY = "application/octet-stream"
_TAR = "application/x-tar"


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
    headers = {"ETag": f'"{row["sha256"]}"'}
    name = PurePosixPath(path).name
    if isinstance(content, Path):
        return FileResponse(content, filename=name, media_type=_BINARY, headers=headers)
    headers["Content-Length"] = str(row["size"])
    return StreamingResponse(content, media_type=_BINARY, headers=headers)


@router.get(
    "/{job_id}/model",
    response_class=Response,
    responses={
        200: {"content": {_TAR: {}}, "description": "The whole archive"},
        206: {"content": {_TAR: {}}, "description": "The bytes asked for"},
    },
)
async def download_model(
    job: VisibleWholeJob,
    session: SessionDep,
    context: ContextDep,
    range_: Annotated[str | None, Header(alias="Range", max_length=200)] = None,
    if_range: Annotated[str | None, Header(max_length=200)] = None,
) -> Response:
    """The exported model as one tar file: a plain Hugging Face folder with a model card.

    An interrupted download can go on with `Range`: the bytes are the same at every request.
    """
    archive = await ArtifactService(session, context.settings).model_archive(job)
    headers = {
        "ETag": archive.etag,
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="{job.id}.tar"',
    }
    wanted = None
    if if_range is None or if_range == archive.etag:
        try:
            wanted = parse_range(range_, archive.size)
        except ValueError as error:
            raise Problem(
                416,
                "range-not-satisfiable",
                "Range not satisfiable",
                f"{error}.",
                headers={"Content-Range": f"bytes */{archive.size}"},
            ) from error
    start, end = wanted or (0, archive.size)
    headers["Content-Length"] = str(end - start)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{archive.size}"
    return StreamingResponse(
        archive.read(start, end),
        status_code=200 if wanted is None else 206,
        media_type=_TAR,
        headers=headers,
    )


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
