"""The engine, one session per unit of work, and raw connections for LISTEN and advisory locks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import ColumnElement, SQLColumnExpression, func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from octrain_api.settings import DatabaseSettings


def seconds(amount: float | SQLColumnExpression[Any]) -> ColumnElement[Any]:
    """An interval of so many seconds, to be added to a time of the database."""
    return func.make_interval(0, 0, 0, 0, 0, 0, amount)


async def database_now(session: AsyncSession) -> datetime:
    """The database's time of this transaction: the only clock of the service."""
    now: datetime = (await session.execute(select(func.now()))).scalar_one()
    return now


async def lock_name(session: AsyncSession, name: str) -> None:
    """Serialise the transactions that would create a row, which is not there yet to be locked."""
    await session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(name, 0))))


class Database:
    """Owns the connection pool of one process."""

    def __init__(self, settings: DatabaseSettings, application_name: str = "octrain") -> None:
        self.settings = settings
        self.engine = create_async_engine(
            settings.sqlalchemy_url,
            pool_size=settings.pool_size,
            max_overflow=settings.max_overflow,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": settings.connect_timeout,
                "application_name": application_name,
            },
        )
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        # The same pool; every transaction reads the database as it was at its first statement.
        snapshots = self.engine.execution_options(isolation_level="REPEATABLE READ")
        self._snapshots = async_sessionmaker(snapshots, expire_on_commit=False)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A session that commits at the end and rolls back on any exception."""
        async with self._sessions() as session, session.begin():
            yield session

    def session(self) -> AsyncSession:
        """A session to be used as a context manager; it rolls back what was not committed."""
        return self._sessions()

    def snapshot(self) -> AsyncSession:
        """The same for readers: what one transaction reads in several statements fits together."""
        return self._snapshots()

    async def connect(self) -> psycopg.AsyncConnection[tuple[object, ...]]:
        """A connection of its own in autocommit, outside the pool."""
        return await psycopg.AsyncConnection.connect(
            self.settings.url,
            autocommit=True,
            connect_timeout=self.settings.connect_timeout,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
        )

    async def close(self) -> None:
        """Close every pooled connection."""
        await self.engine.dispose()
