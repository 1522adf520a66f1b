"""Opening, showing and ending sessions."""

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now, lock_name
from octrain_api.ids import new_id
from octrain_api.keys.principal import Principal, Scope, hash_key
from octrain_api.keys.repository import KeyRepository
from octrain_api.models import ApiKey, KeySession
from octrain_api.problems import Problem, not_found
from octrain_api.sessions.cookies import OpenSession, csrf_token, new_session_token
from octrain_api.sessions.repository import SessionRepository
from octrain_api.sessions.schemas import SessionObject
from octrain_api.settings import SessionSettings


class SessionService:
    """A session is a key's: it may what the key may, and ends with it."""

    def __init__(self, session: AsyncSession, settings: SessionSettings) -> None:
        self._session = session
        self._settings = settings
        self._sessions = SessionRepository(session)

    async def open(self, key: str) -> tuple[str, SessionObject, Principal]:
        """A new session of the holder of this key: its token, how it is shown, who it is."""
        hashed = hash_key(key)
        row = await KeyRepository(self._session).find_active(hashed)
        if row is None:
            raise Problem(
                401,
                "not-authenticated",
                "Not authenticated",
                "This API key is unknown, expired or revoked.",
                headers={"WWW-Authenticate": 'Bearer realm="octrain"'},
            )
        if Scope.NODE in row.scopes:
            raise Problem(
                403,
                "scope-missing",
                "Not allowed",
                "This key is a node's. Sign in with one that has the scope 'jobs:read'.",
                required_scope=Scope.JOBS_READ.value,
            )
        await lock_name(self._session, f"sessions of {row.id}")
        now = await database_now(self._session)
        end = now + timedelta(seconds=self._settings.lifetime)
        token = new_session_token()
        opened = KeySession(
            id=new_id("ses"),
            token_hash=hash_key(token),
            key_id=row.id,
            key_hash=hashed,
            expires_at=end if row.expires_at is None else min(end, row.expires_at),
        )
        await self._sessions.sweep(now)
        await self._sessions.add(opened)
        await self._sessions.keep_newest(row.id, self._settings.most_per_key)
        holder = Principal(key_id=row.id, owner=row.owner, scopes=frozenset(row.scopes))
        return token, session_object(opened, row, token), holder

    async def get(self, current: OpenSession | None) -> SessionObject:
        """The session of this request."""
        opened, key, token = await self._one(current)
        return session_object(opened, key, token)

    async def end(self, current: OpenSession | None) -> str:
        """End the session of this request; its id."""
        opened, _, _ = await self._one(current)
        await self._sessions.end(opened)
        return opened.id

    async def _one(self, current: OpenSession | None) -> tuple[KeySession, ApiKey, str]:
        found = None
        if current is not None:
            found = await self._sessions.find_active(hash_key(current.token))
        if current is None or found is None:
            raise not_found("session", "of this request")
        return found[0], found[1], current.token


def session_object(opened: KeySession, key: ApiKey, token: str) -> SessionObject:
    """A session as its holder sees it."""
    return SessionObject(
        id=opened.id,
        key_id=key.id,
        key_name=key.name,
        owner=key.owner,
        scopes=key.scopes,
        created_at=opened.created_at,
        expires_at=opened.expires_at,
        csrf_token=csrf_token(token),
    )
