"""API keys over HTTP, for administrators."""

from fastapi import APIRouter

from octrain_api.auth import Admin
from octrain_api.dependencies import SessionDep
from octrain_api.keys.schemas import KeyList, KeyObject, KeyRequest, NewKeyObject
from octrain_api.keys.service import KeyService

router = APIRouter(prefix="/keys", tags=["keys"])


@router.post("", status_code=201)
async def create_key(body: KeyRequest, session: SessionDep, principal: Admin) -> NewKeyObject:
    """Make a key; this answer is the only one that shows it."""
    return await KeyService(session).create(body)


@router.get("")
async def list_keys(session: SessionDep, principal: Admin) -> KeyList:
    """Every key, without secrets."""
    return KeyList(items=await KeyService(session).list_all())


@router.delete("/{key_id}")
async def revoke_key(key_id: str, session: SessionDep, principal: Admin) -> KeyObject:
    """Refuse the key from now on; revoking twice changes nothing."""
    return await KeyService(session).revoke(key_id)
