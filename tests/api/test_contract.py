"""The running service keeps what its OpenAPI document says: every check of schemathesis."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from octrain_api.app import create_app
from octrain_api.database import Database
from octrain_api.keys.principal import Scope
from octrain_api.keys.schemas import KeyRequest
from octrain_api.keys.service import KeyService
from octrain_api.server import make_server
from octrain_api.settings import HttpSettings, RateLimitSettings
from tests.api.conftest import make_settings

CONFIG = Path(__file__).with_name("schemathesis.toml")

# These can end the very key that the others need; test_keys.py tries them.
ENDING = ("change_key", "rotate_key", "revoke_key")
USERS = (
    "--exclude-tag",
    "workers",
    *(word for name in ENDING for word in ("--exclude-operation-id", name)),
)


@dataclass
class Running:
    """A service behind a real server, and keys for it."""

    url: str
    user: str
    node: str
    folder: Path


@pytest.fixture
def running(copied_url: str, redis_url: str, tmp_path: Path) -> Iterator[Running]:
    """The service on a port of its own; it limits no rates, and its streams end soon."""
    settings = make_settings(copied_url, redis_url, tmp_path)
    settings.rate_limits = RateLimitSettings(read=0, write=0, worker=0, address=0, sign_in=0)
    settings.http = HttpSettings(
        stream_keep_alive=0.1, stream_poll=0.1, stream_lifetime=0.2, alive_interval=3600
    )

    async def make_keys() -> tuple[str, str]:
        database = Database(settings.database)
        async with database.transaction() as session:
            made = [
                await KeyService(session).create(
                    KeyRequest(name="contract", owner="contract", scopes=scopes)
                )
                for scopes in (
                    [Scope.JOBS_READ, Scope.JOBS_WRITE, Scope.ADMIN],
                    [Scope.NODE],
                )
            ]
        await database.close()
        return made[0].key, made[1].key

    user, node = asyncio.run(make_keys())
    server = make_server(create_app(settings), settings.http, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", user, node, tmp_path)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def check(running: Running, key: str, *options: str) -> None:
    """Run schemathesis on the service; its report is the failure's text."""
    command = [
        str(Path(sys.executable).with_name("st")),
        "--config-file",
        str(CONFIG),
        "run",
        f"{running.url}/openapi.json",
        "--checks",
        "all",
        "--warnings",
        "off",
        "--suppress-health-check",
        "all",
        *options,
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "OCTRAIN_TEST_KEY": key, "NO_COLOR": "1"},
        cwd=running.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    # A key that a generated request had revoked would have been refused everything since.
    own = httpx.get(f"{running.url}/v1/keys/self", headers={"Authorization": f"Bearer {key}"})
    assert own.is_success


def test_users_operations_in_short(running: Running) -> None:
    check(
        running,
        running.user,
        *USERS,
        "--phases",
        "examples,fuzzing",
        "--max-examples",
        "1",
    )


def test_nodes_operations_in_short(running: Running) -> None:
    check(
        running,
        running.node,
        "--include-tag",
        "workers",
        "--phases",
        "examples,fuzzing",
        "--max-examples",
        "1",
    )
