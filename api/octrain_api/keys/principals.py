"""Who holds which key: read from the database, and kept for the requests that follow.

A key that is revoked through the service is refused at once by the process that revoked it, by the
others when they hear of it (milliseconds), and at the latest after 2 seconds (see
`JobListener.is_current`); one that expires, or that somebody revokes by SQL, after `_SECONDS`.
"""

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.caching import Cache
from octrain_api.database import Database
from octrain_api.keys.principal import Principal, hash_key
from octrain_api.keys.repository import KeyRepository
from octrain_api.listener import KEY_CHANNEL, JobListener
from octrain_api.models import ApiKey

_SECONDS = 5.0
_SIZE = 10_000


class Principals:
    """The holders of keys, by key."""

    def __init__(self, database: Database, listener: JobListener) -> None:
        self._database = database
        self._known: Cache[Principal] = Cache(
            lambda: listener.is_current, seconds=_SECONDS, size=_SIZE
        )
        # Kept by the key's hash, told of by the key's id; revoking is rare.
        listener.on_change(KEY_CHANNEL, lambda _: self._known.forget(None))

    def known(self, key: str) -> Principal | None:
        """The holder, if that is certain without asking the database."""
        return self._known.get(hash_key(key))

    async def of(self, key: str) -> Principal | None:
        """The holder; None for a key that is unknown or revoked."""
        hashed = hash_key(key)
        found = self._known.get(hashed)
        if found is not None:
            return found
        with self._known.reading(hashed) as reading:
            async with self._database.session() as session:
                row = await self._find(session, hashed)
            if row is None:
                return None
            found = Principal(
                key_id=row.id,
                owner=row.owner,
                scopes=frozenset(row.scopes),
                node=row.node_name,
            )
            reading.keep(found)
        return found

    async def _find(self, session: AsyncSession, hashed: str) -> ApiKey | None:
        return await KeyRepository(session).find_active(hashed)
