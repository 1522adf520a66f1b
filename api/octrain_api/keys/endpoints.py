"""API keys over HTTP, for administrators; and what a key is, for its holder."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from octrain_api.audit.recording import note_target
from octrain_api.auth import Admin, AnyKey
from octrain_api.dependencies import SessionDep
from octrain_api.idempotency.once import OnceDep
from octrain_api.keys.schemas import (
    KeyChange,
    KeyList,
    KeyObject,
    KeyRequest,
    KeyRotation,
    NewKeyObject,
)
from octrain_api.keys.service import KeyService

router = APIRouter(prefix="/keys", tags=["keys"])


@router.post("", status_code=201)
async def create_key(
    body: KeyRequest,
    request: Request,
    response: Response,
    session: SessionDep,
    principal: Admin,
    once: OnceDep,
) -> NewKeyObject:
    """Make a key; this answer is the only one that shows it.

    Sent again with its Idempotency-Key it makes no second one, and is refused: the key is stored
    as a hash, so it cannot be shown again.
    """
    await once.refuse_earlier("key", "POST /keys/{id}/rotate gives it another one.")
    made = await KeyService(session).create(body)
    await once.made(made.id)
    note_target(request, made.id)
    response.headers["Location"] = f"/v1/keys/{made.id}"
    response.headers["Cache-Control"] = "no-store"
    return made


@router.get("")
async def list_keys(
    session: SessionDep,
    principal: Admin,
    owner: Annotated[str | None, Query(max_length=128)] = None,
    revoked: Annotated[bool, Query(description="false leaves revoked keys out")] = True,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> KeyList:
    """Keys without their secrets, oldest first."""
    return await KeyService(session).list_page(owner, revoked, limit, cursor)


@router.get("/self")
async def get_own_key(session: SessionDep, principal: AnyKey) -> KeyObject:
    """The key of this very request: its owner, its scopes, its end."""
    return await KeyService(session).get(principal.key_id)


@router.get("/{key_id}")
async def get_key(key_id: str, session: SessionDep, principal: Admin) -> KeyObject:
    """One key, without its secret."""
    return await KeyService(session).get(key_id)


@router.patch("/{key_id}")
async def change_key(
    key_id: str, body: KeyChange, session: SessionDep, principal: Admin
) -> KeyObject:
    """Rename the key, or say when it ends."""
    return await KeyService(session).change(key_id, body)


@router.post("/{key_id}/rotate")
async def rotate_key(
    key_id: str,
    response: Response,
    session: SessionDep,
    principal: Admin,
    body: KeyRotation | None = None,
) -> NewKeyObject:
    """Give the key a new secret, shown here once; the present one serves through the grace."""
    response.headers["Cache-Control"] = "no-store"
    grace = (body or KeyRotation()).grace_seconds
    return await KeyService(session).rotate(key_id, grace)


@router.delete("/{key_id}")
async def revoke_key(key_id: str, session: SessionDep, principal: Admin) -> KeyObject:
    """Refuse the key from now on; revoking twice changes nothing."""
    return await KeyService(session).revoke(key_id)
