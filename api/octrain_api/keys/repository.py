"""API keys in the database."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now
from octrain_api.listener import notify_key
from octrain_api.models import ApiKey


class KeyRepository:
    """Reads and writes API keys."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def find_active(self, key_hash: str) -> ApiKey | None:
        """The key with this hash, unless it is revoked."""
        statement = select(ApiKey).where(ApiKey.key_hash == key_hash, ApiKey.revoked_at.is_(None))
        return (await self._session.scalars(statement)).one_or_none()

    async def get(self, key_id: str) -> ApiKey | None:
        """The key with this id."""
        return await self._session.get(ApiKey, key_id)

    async def list_all(self) -> Sequence[ApiKey]:
        """Every key, oldest first."""
        statement = select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)
        return (await self._session.scalars(statement)).all()

    async def add(self, key: ApiKey) -> ApiKey:
        """Store a new key."""
        self._session.add(key)
        await self._session.flush()
        await self._session.refresh(key)
        return key

    async def revoke(self, key: ApiKey) -> None:
        """Mark a key as revoked now; a revoked one stays as it is."""
        if key.revoked_at is None:
            key.revoked_at = await database_now(self._session)
            await self._session.flush()
            await notify_key(self._session, key.id)
