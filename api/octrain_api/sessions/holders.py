"""Who holds which session: read from the database, and kept for the requests that follow.

What ends a session through the service (signing out, revoking or rotating its key) is heard as
`octrain_api.keys.principals` says; its own end, and that of its key, within `_SECONDS`.
"""

from octrain_api.caching import Cache
from octrain_api.database import Database
from octrain_api.keys.principal import Principal, hash_key
from octrain_api.listener import KEY_CHANNEL, JobListener
from octrain_api.sessions.repository import SessionRepository

_SECONDS = 5.0
_SIZE = 10_000


class SessionHolders:
    """The holders of sessions, by token."""

    def __init__(self, database: Database, listener: JobListener) -> None:
        self._database = database
        self._known: Cache[Principal] = Cache(
            lambda: listener.is_current, seconds=_SECONDS, size=_SIZE
        )
        listener.on_change(KEY_CHANNEL, lambda _: self._known.forget(None))

    async def of(self, token: str) -> Principal | None:
        """The holder; None for a session that is unknown or over."""
        hashed = hash_key(token)
        found = self._known.get(hashed)
        if found is not None:
            return found
        with self._known.reading(hashed) as reading:
            async with self._database.session() as session:
                rows = await SessionRepository(session).find_active(hashed)
            if rows is None:
                return None
            key = rows[1]
            found = Principal(key_id=key.id, owner=key.owner, scopes=frozenset(key.scopes))
            reading.keep(found)
        return found
