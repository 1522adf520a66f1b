"""API keys and enrolment tokens in the database."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import func, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now
from octrain_api.listener import notify_key
from octrain_api.models import ApiKey, EnrolmentToken


class KeyRepository:
    """Reads and writes API keys."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def find_active(self, key_hash: str) -> ApiKey | None:
        """The key with this hash, or with this one until the grace of its rotation is over,
        unless it is revoked or has expired."""
        former = (ApiKey.previous_hash == key_hash) & (ApiKey.previous_until > func.now())
        statement = select(ApiKey).where(
            or_(ApiKey.key_hash == key_hash, former),
            ApiKey.revoked_at.is_(None),
            or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()),
        )
        return (await self._session.scalars(statement)).one_or_none()

    async def get(self, key_id: str) -> ApiKey | None:
        """The key with this id."""
        return await self._session.get(ApiKey, key_id)

    async def lock(self, key_id: str) -> ApiKey | None:
        """The key with this id, locked."""
        statement = select(ApiKey).where(ApiKey.id == key_id).with_for_update()
        statement = statement.execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def of_node(self, node_name: str) -> Sequence[ApiKey]:
        """The key that speaks for this node, if it has one that is not revoked."""
        statement = select(ApiKey).where(ApiKey.node_name == node_name, ApiKey.revoked_at.is_(None))
        return (await self._session.scalars(statement.with_for_update())).all()

    async def page(
        self, owner: str | None, with_revoked: bool, limit: int, after: tuple[datetime, str] | None
    ) -> Sequence[ApiKey]:
        """Up to `limit` keys, oldest first, made after the row `after`."""
        statement = select(ApiKey).order_by(ApiKey.created_at, ApiKey.id).limit(limit)
        if owner is not None:
            statement = statement.where(ApiKey.owner == owner)
        if not with_revoked:
            statement = statement.where(ApiKey.revoked_at.is_(None))
        if after is not None:
            statement = statement.where(tuple_(ApiKey.created_at, ApiKey.id) > after)
        return (await self._session.scalars(statement)).all()

    async def add(self, key: ApiKey) -> ApiKey:
        """Store a new key."""
        self._session.add(key)
        await self._session.flush()
        await self._session.refresh(key)
        return key

    async def changed(self, key: ApiKey) -> None:
        """Write a changed key, and tell every process that it is not what it was."""
        await self._session.flush()
        await notify_key(self._session, key.id)

    async def revoke(self, key: ApiKey) -> None:
        """Mark a key as revoked now; a revoked one stays as it is."""
        if key.revoked_at is None:
            key.revoked_at = await database_now(self._session)
            await self.changed(key)


class TokenRepository:
    """Reads and writes enrolment tokens."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, token: EnrolmentToken) -> None:
        """Store a new token."""
        self._session.add(token)
        await self._session.flush()
        await self._session.refresh(token)

    async def newest(self, limit: int) -> Sequence[EnrolmentToken]:
        """Up to `limit` tokens, newest first."""
        statement = select(EnrolmentToken).order_by(
            EnrolmentToken.created_at.desc(), EnrolmentToken.id.desc()
        )
        return (await self._session.scalars(statement.limit(limit))).all()

    async def lock(self, token_id: str) -> EnrolmentToken | None:
        """The token with this id, locked."""
        statement = select(EnrolmentToken).where(EnrolmentToken.id == token_id).with_for_update()
        return (await self._session.scalars(statement)).one_or_none()

    async def use(self, token_hash: str) -> EnrolmentToken | None:
        """Use up the token with this hash; None when it is unknown, used or has ended."""
        statement = (
            update(EnrolmentToken)
            .where(EnrolmentToken.token_hash == token_hash)
            .where(EnrolmentToken.used_at.is_(None), EnrolmentToken.expires_at > func.now())
            .values(used_at=func.now())
            .returning(EnrolmentToken)
        )
        return (await self._session.scalars(statement)).one_or_none()
