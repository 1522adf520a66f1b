"""The service behind a real server, for programs that reach it by its address."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octrain_api.app import create_app
from octrain_api.database import Database
from octrain_api.keys.principal import Scope
from octrain_api.keys.schemas import KeyRequest, NewKeyObject
from octrain_api.keys.service import KeyService
from octrain_api.server import make_server
from octrain_api.settings import HttpSettings, RateLimitSettings
from tests.api.conftest import make_settings


@dataclass
class Running:
    """A service behind a real server, and keys for it; `spare` is one that a run may end."""

    url: str
    user: NewKeyObject
    spare: NewKeyObject
    node: NewKeyObject
    folder: Path


@contextlib.contextmanager
def served(database_url: str, redis_url: str, folder: Path) -> Iterator[Running]:
    """The service on a port of its own; it limits no rates, and its streams end soon."""
    settings = make_settings(database_url, redis_url, folder)
    settings.rate_limits = RateLimitSettings(read=0, write=0, worker=0, address=0, sign_in=0)
    settings.http = HttpSettings(
        stream_keep_alive=0.1, stream_poll=0.1, stream_lifetime=0.2, alive_interval=3600
    )

    async def make_keys() -> list[NewKeyObject]:
        database = Database(settings.database)
        users = [Scope.JOBS_READ, Scope.JOBS_WRITE, Scope.ADMIN]
        async with database.transaction() as session:
            made = [
                await KeyService(session).create(
                    KeyRequest(name="contract", owner="contract", scopes=scopes)
                )
                for scopes in (users, users, [Scope.NODE])
            ]
        await database.close()
        return made

    user, spare, node = asyncio.run(make_keys())
    server = make_server(create_app(settings), settings.http, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", user, spare, node, folder)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
