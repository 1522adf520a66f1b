"""A real server on a port of its own, plain connections to it, and much for them to read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from octrain_api.app import create_app
from octrain_api.server import make_server
from octrain_api.settings import HttpSettings, Settings

PATIENCE = 30.0


class Running:
    """A server on a port of its own."""

    def __init__(self, app: Any, port: int) -> None:
        self.app, self.port = app, port

    async def connect(
        self, receive_bytes: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A plain connection; `receive_bytes` is the size of the kernel's buffer."""
        plain = socket.socket()
        if receive_bytes is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=plain, limit=2**16)

    async def connections(self) -> int:
        return len(self.app.state.server.server_state.connections)


Start = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


@contextlib.asynccontextmanager
async def serving(settings: Settings, **changes: Any) -> AsyncIterator[Running]:
    """The application behind its own server, with some of its settings of HTTP changed."""
    http = HttpSettings(alive_interval=3600, stream_keep_alive=3600, **changes)
    app = create_app(settings.model_copy(update={"http": http}))
    server = make_server(app, http, "127.0.0.1", 0)
    server.config.lifespan = "on"
    app.state.server = server
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done()
        await asyncio.sleep(0.01)
    try:
        yield Running(app, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        await task


async def plant_long_events(service: Any, job_id: str, count: int) -> None:
    """Events of 64 kB, more of them than the kernel keeps for a reader, counted by their job."""
    await service.sql(
        "INSERT INTO events (job_id, seq, kind, actor, message, data) "
        "SELECT :job, n + 1, 'note', 'test', repeat('m', 64000), '{}' "
        "FROM generate_series(1, :count) AS n",
        job=job_id,
        count=count,
    )
    await service.sql(
        "UPDATE jobs SET sequence = :last WHERE id = :job", job=job_id, last=count + 1
    )
