"""Stops a transaction in its middle, so that a test can see who waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sqlalchemy import text

_KEY = 4711
_FUNCTION = f"""
CREATE OR REPLACE FUNCTION hold_here() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock({_KEY}); RETURN NULL; END $$
"""
_WAITING = f"""
SELECT 1 FROM pg_locks
WHERE locktype = 'advisory' AND NOT granted AND objid = {_KEY}
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@contextlib.asynccontextmanager
async def held(service: Any, verb: str, table: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """While the block runs, a transaction that has changed rows of the table with this verb goes no
    further. What the block is given returns once one has come so far.
    """
    await service.sql(_FUNCTION)
    await service.sql(
        f"CREATE TRIGGER hold_here AFTER {verb} ON {table} FOR EACH ROW "
        "EXECUTE FUNCTION hold_here()"
    )

    async def inside() -> None:
        async with asyncio.timeout(30):
            while not await service.sql(_WAITING):
                await asyncio.sleep(0.01)

    async with service.database.transaction() as session:
        await session.execute(text(f"SELECT pg_advisory_xact_lock({_KEY})"))
        yield inside
