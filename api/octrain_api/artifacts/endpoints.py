"""Artifacts over HTTP."""

from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Header, Query
from fastapi.responses import FileResponse, Response, StreamingResponse

from octrain_api.artifacts.archive import StoredFile, TarArchive, parse_range
from octrain_api.artifacts.schemas import ArtifactList, ConversionReport, PrecisionTable
from octrain_api.artifacts.service import ArtifactService
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.jobs.access import VisibleJob, VisibleWholeJob
from octrain_api.problems import Problem

router = APIRouter(prefix="/jobs", tags=["artifacts"])

_BINARY = "application/octet-stream"
_TAR = "application/x-tar"

RangeHeader = Annotated[str | None, Header(alias="Range", max_length=200)]
IfRangeHeader = Annotated[str | None, Header(alias="If-Range", max_length=200)]


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
    responses={
        200: {"content": {_BINARY: {}}, "description": "The file's bytes"},
        206: {"content": {_BINARY: {}}, "description": "The bytes asked for"},
    },
)
async def download_file(
    job: VisibleJob,
    artifact_id: str,
    path: str,
    session: SessionDep,
    context: ContextDep,
    range_: RangeHeader = None,
    if_range: IfRangeHeader = None,
) -> Response:
    """One file of an artifact. Its sha256 is the ETag."""
    file = await ArtifactService(session, context.settings).file(job.id, artifact_id, path)
    etag, name = f'"{file.sha256}"', PurePosixPath(path).name
    if file.local is not None and range_ is None:
        return FileResponse(file.local, filename=name, media_type=_BINARY, headers={"ETag": etag})
    wanted = _wanted(range_, if_range, etag, file.size)
    return _streamed(file, wanted, etag=etag, name=name, media_type=_BINARY)


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
    range_: RangeHeader = None,
    if_range: IfRangeHeader = None,
) -> Response:
    """The exported model as one tar file: a plain Hugging Face folder with a model card.

    An interrupted download can go on with `Range`: the bytes are the same at every request.
    """
    archive = await ArtifactService(session, context.settings).model_archive(job)
    wanted = _wanted(range_, if_range, archive.etag, archive.size)
    return _streamed(archive, wanted, etag=archive.etag, name=f"{job.id}.tar", media_type=_TAR)


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


def _wanted(
    range_: str | None, if_range: str | None, etag: str, size: int
) -> tuple[int, int] | None:
    """The bytes that are asked for, None for all of them; 416 for such as there are not."""
    if if_range is not None and if_range != etag:
        return None
    try:
        return parse_range(range_, size)
    except ValueError as error:
        raise Problem(
            416,
            "range-not-satisfiable",
            "Range not satisfiable",
            f"{error}.",
            headers={"Content-Range": f"bytes */{size}"},
        ) from error


def _streamed(
    content: StoredFile | TarArchive,
    wanted: tuple[int, int] | None,
    *,
    etag: str,
    name: str,
    media_type: str,
) -> StreamingResponse:
    start, end = wanted or (0, content.size)
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Content-Disposition": _disposition(name),
        "Content-Length": str(end - start),
    }
    if wanted is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{content.size}"
    return StreamingResponse(
        content.read(start, end),
        status_code=200 if wanted is None else 206,
        media_type=media_type,
        headers=headers,
    )


def _disposition(name: str) -> str:
    """A download of this name, also one that is not ASCII (RFC 6266)."""
    quoted = quote(name)
    file = f'filename="{name}"' if quoted == name else f"filename*=utf-8''{quoted}"
    return f"attachment; {file}"
