"""The engine, one session per unit of work, and raw connections for LISTEN and advisory locks."""

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import ColumnElement, Engine, SQLColumnExpression, event, func, select
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

from octrain_api.direct import Connection, DirectConnections
from octrain_api.settings import DatabaseSettings
from octrain_api.silence import Silence

# Seconds for which a connection that was just used is not asked whether it still lives.
_SURELY_ALIVE = 1.0
# Seconds to wait for a connection while all are in use.
_PATIENCE = 30.0
# How a peer is noticed that is gone without a word: by the kernel, within half a minute.
_LIVENESS: dict[str, Any] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
_ENDABLE = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


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


async def psycopg_of(session: AsyncSession) -> Connection:
    """The driver's own connection, in the transaction of this session; what it has is written."""
    await session.flush()
    connection = await session.connection()
    raw = (await connection.get_raw_connection()).driver_connection
    assert isinstance(raw, psycopg.AsyncConnection)
    return raw


def _ask_whether_it_lives(engine: Engine) -> None:
    """Try a connection of the pool before it is used, if it has lain there for a second or more.

    Of one that was in use a moment ago it would be a round trip for nothing.
    """

    @event.listens_for(engine, "checkin")
    def _put_back(_: Any, record: Any) -> None:
        record.info["idle_since"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _take_out(connection: Any, record: Any, _: Any) -> None:
        idle_since = record.info.get("idle_since")
        if idle_since is None or time.monotonic() - idle_since < _SURELY_ALIVE:
            return
        try:
            engine.dialect.do_ping(connection)
        except psycopg.Error as error:
            # The pool drops all that is older, and takes another one.
            raise InvalidatePoolError(str(error)) from error


def _tell_of_each(engine: Engine, silence: Silence) -> None:
    """Have the connections that the pool makes watched over."""

    @event.listens_for(engine, "connect")
    def _made(connection: Any, _: Any) -> None:
        silence.watch_over(connection.driver_connection)


class Database:
    """Owns the connection pool of one process."""

    def __init__(self, settings: DatabaseSettings, application_name: str = "octrain") -> None:
        self.settings = settings
        self.engine = create_async_engine(
            settings.sqlalchemy_url,
            pool_size=settings.pool_size,
            max_overflow=settings.max_overflow,
            connect_args={
                "connect_timeout": settings.connect_timeout,
                "application_name": application_name,
                **_LIVENESS,
            },
        )
        self.silence = Silence(lambda: self.connect(application_name), settings.answer_timeout)
        _tell_of_each(self.engine.sync_engine, self.silence)
        _ask_whether_it_lives(self.engine.sync_engine)
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        self._direct = DirectConnections(
            lambda: self.connect(application_name), settings.pool_size, _PATIENCE
        )
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
        """A session for readers: what it reads in several statements is of one moment."""
        return self._snapshots()

    def direct(self) -> AbstractAsyncContextManager[Connection]:
        """The driver's own connection, of others than the pool's, that commits each statement."""
        return self._direct.connection()

    @asynccontextmanager
    async def direct_snapshot(self) -> AsyncIterator[Connection]:
        """The same for several statements that only read, and all read one moment."""
        async with self._direct.connection() as connection:
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                yield connection
            finally:
                # One that is amid a statement, or broken, is not used again.
                if connection.pgconn.transaction_status in _ENDABLE:
                    await connection.execute("ROLLBACK")

    @property
    def connections_used(self) -> int:
        """How many connections are in use by requests now."""
        pool: Any = self.engine.pool
        return int(pool.checkedout()) + self._direct.used

    async def connect(self, application_name: str | None = None) -> Connection:
        """A connection of its own in autocommit, outside the pool."""
        connection = await psycopg.AsyncConnection.connect(
            self.settings.url,
            autocommit=True,
            connect_timeout=self.settings.connect_timeout,
            application_name=application_name,
            **_LIVENESS,
        )
        self.silence.watch_over(connection)
        return connection

    async def close(self) -> None:
        """Close every pooled connection."""
        await self._direct.close()
        await self.engine.dispose()
