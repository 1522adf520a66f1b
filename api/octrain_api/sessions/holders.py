"""Who holds which session: read from the database, and kept for the requests that follow.

What ends a session through the service (signing out, revoking or rotating its key) is heard as
`octrain_api.keys.principals` says; its own end, and that of its key, within its few seconds.
"""

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.keys.principals import Principals
from octrain_api.models import ApiKey
from octrain_api.sessions.repository import SessionRepository


class SessionHolders(Principals):
    """The holders of sessions, by token: those of the keys that opened them."""

    async def _find(self, session: AsyncSession, hashed: str) -> ApiKey | None:
        rows = await SessionRepository(session).find_active(hashed)
        return None if rows is None else rows[1]
