"""When the parts of the service lived: the source of downtime, by the database's clock."""

import asyncio
import logging
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import case

from octrain_api.database import Database, seconds
from octrain_api.models import ServiceClock

log = logging.getLogger("octrain_api.clocks")

API = "api"
CONTROLLER = "controller"


async def beat(session: AsyncSession, name: str, tolerance: int) -> None:
    """Note that a part lives now; a silence longer than `tolerance` seconds starts it anew."""
    now = func.now()
    statement = insert(ServiceClock).values(
        name=name, alive_at=now, up_since=now, counted_until=now
    )
    gone = ServiceClock.alive_at < now - seconds(tolerance)
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=[ServiceClock.name],
            set_={"alive_at": now, "up_since": case((gone, now), else_=ServiceClock.up_since)},
        )
    )


async def lock_clock(session: AsyncSession, name: str) -> ServiceClock | None:
    """The clock of a part, locked."""
    statement = select(ServiceClock).where(ServiceClock.name == name).with_for_update()
    statement = statement.execution_options(populate_existing=True)
    return (await session.scalars(statement)).one_or_none()


async def api_was_away_since(session: AsyncSession, moment: datetime, tolerance: int) -> bool:
    """Whether the API was away, at some time after `moment`, for more than `tolerance` seconds.

    After an outage of the database a supervisor may be answered before the API has noted that it is
    back; its last note is then that old.
    """
    missed = ServiceClock.alive_at < func.now() - seconds(tolerance)
    statement = select((ServiceClock.up_since > moment) | missed).where(ServiceClock.name == API)
    return bool(await session.scalar(statement))


async def beat_for_ever(database: Database, name: str, interval: float, tolerance: int) -> None:
    """Beat until cancelled; a failure is the very thing to be noticed, by its gap."""
    while True:
        try:
            async with database.transaction() as session:
                await beat(session, name, tolerance)
        except (SQLAlchemyError, OSError) as error:
            log.warning("cannot note that the %s lives: %s", name, error)
        await asyncio.sleep(interval)
