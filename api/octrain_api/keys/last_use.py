"""When keys were last used: noted in memory, written once a minute for all of them together."""

import asyncio
import logging

from sqlalchemy import func, update
from sqlalchemy.exc import SQLAlchemyError

from octrain_api.database import Database
from octrain_api.models import ApiKey

log = logging.getLogger("octrain_api.keys")


class LastUse:
    """The keys used since the last write."""

    def __init__(self, database: Database, interval: float) -> None:
        self._database = database
        self._interval = interval
        self._used: set[str] = set()

    def note(self, key_id: str) -> None:
        """The key was used now."""
        self._used.add(key_id)

    async def write(self) -> int:
        """Write what was noted, in one statement; how many keys."""
        if not self._used:
            return 0
        used, self._used = self._used, set()
        try:
            async with self._database.transaction() as session:
                await session.execute(
                    update(ApiKey).where(ApiKey.id.in_(used)).values(last_used_at=func.now())
                )
        except (SQLAlchemyError, OSError):
            self._used |= used
            raise
        return len(used)

    async def write_for_ever(self) -> None:
        """Write at every interval until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(self._interval)
                await self._try()
        finally:
            await self._try()

    async def _try(self) -> None:
        try:
            await self.write()
        except (SQLAlchemyError, OSError) as error:
            log.warning("the last use of keys cannot be written now: %s", error)
