"""Making and revoking API keys."""

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.auth import hash_key, new_key
from octrain_api.ids import new_id
from octrain_api.keys.repository import KeyRepository
from octrain_api.keys.schemas import KeyObject, KeyRequest, NewKeyObject
from octrain_api.models import ApiKey
from octrain_api.problems import not_found


class KeyService:
    """Keys are shown once, when they are made."""

    def __init__(self, session: AsyncSession) -> None:
        self._keys = KeyRepository(session)

    async def create(self, request: KeyRequest) -> NewKeyObject:
        """Make a key."""
        key = new_key()
        row = ApiKey(
            id=new_id("key"),
            name=request.name,
            owner=request.owner,
            key_hash=hash_key(key),
            scopes=sorted(set(request.scopes)),
        )
        await self._keys.add(row)
        return NewKeyObject(**_key_object(row).model_dump(), key=key)

    async def list_all(self) -> list[KeyObject]:
        """Every key, revoked ones too."""
        return [_key_object(row) for row in await self._keys.list_all()]

    async def revoke(self, key_id: str) -> KeyObject:
        """Refuse the key from now on."""
        row = await self._keys.get(key_id)
        if row is None:
            raise not_found("key", key_id)
        await self._keys.revoke(row)
        return _key_object(row)


def _key_object(row: ApiKey) -> KeyObject:
    return KeyObject(
        id=row.id,
        name=row.name,
        owner=row.owner,
        scopes=row.scopes,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
    )
