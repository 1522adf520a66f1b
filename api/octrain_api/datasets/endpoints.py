"""Data sets over HTTP: announced with POST, sent in parts with PATCH; HEAD says where to go on."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from octrain_api.auth import Reader, Writer
from octrain_api.datasets.receiving import receive_part
from octrain_api.datasets.schemas import (
    DatasetList,
    DatasetObject,
    DatasetRequest,
    DatasetStatus,
)
from octrain_api.datasets.service import DatasetService
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.idempotency.once import OnceDep

router = APIRouter(prefix="/datasets", tags=["datasets"])

_OFFSET = {
    "Upload-Offset": {
        "description": "bytes stored so far: where the next part begins",
        "schema": {"type": "integer"},
    },
    "Upload-Length": {"description": "bytes of the whole file", "schema": {"type": "integer"}},
}
_PART_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The bytes from `Upload-Offset` on.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


async def _readable(session: SessionDep, context: ContextDep, principal: Reader) -> DatasetService:
    return DatasetService(session, context.settings.datasets, principal)


async def _writable(session: SessionDep, context: ContextDep, principal: Writer) -> DatasetService:
    return DatasetService(session, context.settings.datasets, principal)


ReadService = Annotated[DatasetService, Depends(_readable, scope="function")]
WriteService = Annotated[DatasetService, Depends(_writable, scope="function")]


@router.post("", status_code=201)
async def create_dataset(
    body: DatasetRequest, response: Response, service: WriteService, once: OnceDep
) -> DatasetObject:
    """Announce a file. The same name, content and format again gives the same data set (200)."""
    identifier = await once.earlier()
    if identifier is not None:
        made = await service.get(identifier)
        once.mark(response)
    else:
        made, new = await service.announce(body)
        await once.made(made.id)
        response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/datasets/{made.id}"
    return made


@router.get("")
async def list_datasets(
    service: ReadService,
    status: DatasetStatus | None = None,
    name: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> DatasetList:
    """Data sets, newest first, and how much of the quota they use."""
    return await service.list_page(status, name, limit, cursor)


@router.get("/{dataset_id}")
async def get_dataset(dataset_id: str, service: ReadService) -> DatasetObject:
    """One data set: how much of it is stored, and what its check found."""
    return await service.get(dataset_id)


@router.delete("/{dataset_id}", status_code=204)
async def delete_dataset(dataset_id: str, service: WriteService) -> None:
    """Delete a data set, or give an upload up. 409 while a job that has not ended reads it."""
    await service.remove(dataset_id)


@router.head(
    "/{dataset_id}/content",
    status_code=204,
    response_class=Response,
    responses={204: {"headers": _OFFSET, "description": "How much is stored"}},
)
async def get_upload_offset(dataset_id: str, service: ReadService) -> Response:
    """Where an upload that was cut goes on: the header `Upload-Offset`."""
    dataset = await service.get(dataset_id)
    return _progress(dataset.received, dataset.size)


@router.patch(
    "/{dataset_id}/content",
    status_code=204,
    response_class=Response,
    openapi_extra=_PART_BODY,
    responses={204: {"headers": _OFFSET, "description": "Stored, and safe from any crash"}},
)
async def upload_part(
    dataset_id: str,
    request: Request,
    context: ContextDep,
    principal: Writer,
    upload_offset: Annotated[int, Header(ge=0, le=2**53, description="where this part begins")],
) -> Response:
    """Send the next part. After a cut ask HEAD: what had been read by then is kept."""
    done = await receive_part(
        context.database,
        context.settings,
        principal.visible_owner,
        dataset_id,
        upload_offset,
        request.stream(),
    )
    return _progress(done.offset, done.size)


def _progress(offset: int, size: int) -> Response:
    headers = {
        "Upload-Offset": str(offset),
        "Upload-Length": str(size),
        "Cache-Control": "no-store",
    }
    return Response(status_code=204, headers=headers)
