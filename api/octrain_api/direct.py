"""Connections for the few statements that most requests are: psycopg itself, nothing in between.

A session of SQLAlchemy asks for a connection, begins, executes and ends in a coroutine each, which
costs an API process more than the statement. What is executed here is one statement, and so one
transaction.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
# Seconds for which a connection that was just used is not asked whether it still lives.
_SURELY_ALIVE = 1.0


class TooManyWait(psycopg.OperationalError):
    """No connection became free in time."""


class DirectConnections:
    """At most `most` connections in autocommit; the one used last is used next.

    `connect` makes one. Errors of connecting are the caller's at once: nothing retries in between.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[Connection]], most: int, patience: float
    ) -> None:
        self._connect = connect
        self._free = asyncio.Semaphore(most)
        self._patience = patience
        self._idle: list[tuple[float, Connection]] = []
        self.used = 0

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for statements of their own. Raises psycopg.OperationalError."""
        if self._free.locked():
            await self._wait()
        else:
            await self._free.acquire()
        self.used += 1
        connection: Connection | None = None
        try:
            connection = await self._take()
            yield connection
        finally:
            self.used -= 1
            self._free.release()
            if connection is not None:
                await self._put(connection)

    async def close(self) -> None:
        """Close those that nobody uses."""
        idle, self._idle = self._idle, []
        for _, connection in idle:
            await connection.close()

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._free.acquire(), self._patience)
        except TimeoutError as error:
            raise TooManyWait(
                f"no connection was free within {self._patience:g} seconds"
            ) from error

    async def _take(self) -> Connection:
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < _SURELY_ALIVE:
                return connection
            try:
                await connection.execute("")
            except psycopg.Error:
                await connection.close()
            else:
                return connection
        return await self._connect()

    async def _put(self, connection: Connection) -> None:
        # One that broke, or whose statement was cut off in the middle, is of no use to anybody.
        if connection.pgconn.transaction_status == TransactionStatus.IDLE:
            self._idle.append((time.monotonic(), connection))
            return
        if connection.broken:
            # The server has gone, most likely, and the others with it.
            await self.close()
        await connection.close()
