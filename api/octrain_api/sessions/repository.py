"""Sessions in the database."""

from datetime import datetime

from sqlalchemy import delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.listener import notify_key
from octrain_api.models import ApiKey, KeySession

_SWEPT = 100


class SessionRepository:
    """Reads and writes sessions."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def find_active(self, token_hash: str) -> tuple[KeySession, ApiKey] | None:
        """The session with this token's hash and the key that opened it, while both are valid.

        A key that was rotated takes the sessions of its former secret along when that one's grace
        is over.
        """
        former = (ApiKey.previous_hash == KeySession.key_hash) & (
            ApiKey.previous_until > func.now()
        )
        statement = (
            select(KeySession, ApiKey)
            .join(ApiKey, ApiKey.id == KeySession.key_id)
            .where(
                KeySession.token_hash == token_hash,
                KeySession.expires_at > func.now(),
                ApiKey.revoked_at.is_(None),
                or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()),
                or_(ApiKey.key_hash == KeySession.key_hash, former),
            )
        )
        found = (await self._session.execute(statement)).one_or_none()
        return (found[0], found[1]) if found is not None else None

    async def add(self, row: KeySession) -> None:
        """Store a new session."""
        self._session.add(row)
        await self._session.flush()
        await self._session.refresh(row)

    async def keep_newest(self, key_id: str, most: int) -> None:
        """End all sessions of the key but its `most` newest."""
        kept = (
            select(KeySession.id)
            .where(KeySession.key_id == key_id)
            .order_by(KeySession.created_at.desc(), KeySession.id.desc())
            .limit(most)
        )
        ended = await self._session.execute(
            delete(KeySession)
            .where(KeySession.key_id == key_id, KeySession.id.not_in(kept))
            .returning(KeySession.id)
        )
        for identifier in ended.scalars():
            await notify_key(self._session, identifier)

    async def sweep(self, now: datetime) -> None:
        """Remove some sessions that are over."""
        over = (
            select(KeySession.id)
            .where(KeySession.expires_at <= now)
            .limit(_SWEPT)
            .with_for_update(skip_locked=True)
        )
        await self._session.execute(delete(KeySession).where(KeySession.id.in_(over)))

    async def end(self, row: KeySession) -> None:
        """Remove a session, and tell every process."""
        await self._session.delete(row)
        await self._session.flush()
        await notify_key(self._session, row.id)
