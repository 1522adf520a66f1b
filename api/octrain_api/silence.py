"""A database that is there and gives no answer: a paused machine, a stalled disk, a dropped route.

No error comes of it, so whoever has asked would wait for as long as it lasts. Every second a probe
asks over a connection of its own; when that stays without an answer for too long, the connections
on which others wait are shut down. Their statements then fail as those of a database that is away,
and requests are answered with 503. What such a statement was to change may come about all the same.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from weakref import WeakSet

import psycopg
from psycopg.pq import TransactionStatus

from octrain_api.direct import Connection
from octrain_api.tasks import end_tasks

log = logging.getLogger("octrain_api.silence")

_PAUSE = 1.0
# An answer that has come while this process itself was held up is heard within that.
_LAST_LOOK = 0.5


class Silence:
    """Watches over the connections of one process. `answer_timeout`: seconds."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], answer_timeout: float) -> None:
        self._connect = connect
        self._answer_timeout = answer_timeout
        self._connections: WeakSet[Connection] = WeakSet()
        self._probe: Connection | None = None

    def watch_over(self, connection: Connection) -> None:
        """Shut this connection down, too, when a statement on it waits for a silent database."""
        self._connections.add(connection)

    async def run(self) -> None:
        """Ask until cancelled."""
        heard_at = time.monotonic()
        try:
            while True:
                asking = asyncio.create_task(self._ask())
                left = heard_at + self._answer_timeout - time.monotonic()
                for seconds in (max(left, 0.0), _LAST_LOOK):
                    await asyncio.wait({asking}, timeout=seconds)
                now = time.monotonic()
                if asking.done() and _is_word(asking):
                    heard_at = now
                elif now - heard_at >= self._answer_timeout:
                    log.error(
                        "the database has said nothing for %.0f s; %d statements are given up",
                        now - heard_at,
                        self._shut_down(),
                    )
                    heard_at = now
                    # It sees the end of its own connection too.
                    await asyncio.wait({asking}, timeout=_LAST_LOOK)
                await end_tasks([asking])
                await asyncio.sleep(_PAUSE)
        finally:
            if self._probe is not None:
                await self._probe.close()

    async def _ask(self) -> None:
        if self._probe is None or self._probe.closed:
            self._probe = await self._connect()
        await self._probe.execute("SELECT 1")

    def _shut_down(self) -> int:
        count = 0
        for connection in list(self._connections):
            if connection.closed:
                continue
            if connection.pgconn.transaction_status != TransactionStatus.ACTIVE:
                continue
            # A copy: the descriptor stays the driver's, which finds the stream at its end.
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(connection.pgconn.socket)) as copy,
            ):
                copy.shutdown(socket.SHUT_RDWR)
                count += 1
        return count


def _is_word(asked: asyncio.Task[None]) -> bool:
    """Whether the database has been heard: by its answer, or by an error that is not a silence."""
    error = asked.exception()
    if error is None:
        return True
    if not isinstance(error, psycopg.Error | OSError):
        raise error
    return not isinstance(error, psycopg.errors.ConnectionTimeout)
