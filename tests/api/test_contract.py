"""The running service keeps what its OpenAPI document says: every check of schemathesis.

What it is told is in schemathesis.toml and contract_hooks.py. No operation is left out, and no
check.
"""

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
from octrain_api.keys.schemas import KeyRequest, NewKeyObject
from octrain_api.keys.service import KeyService
from octrain_api.server import make_server
from octrain_api.settings import HttpSettings, RateLimitSettings
from tests.api.conftest import make_settings

# Each is many requests: a busy machine may take long over them.
pytestmark = pytest.mark.timeout(900)

CONFIG = Path(__file__).with_name("schemathesis.toml")
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Running:
    """A service behind a real server, and keys for it; `spare` is one that a run may end."""

    url: str
    user: NewKeyObject
    spare: NewKeyObject
    node: NewKeyObject
    folder: Path


@pytest.fixture
def running(copied_url: str, redis_url: str, tmp_path: Path) -> Iterator[Running]:
    """The service on a port of its own; it limits no rates, and its streams end soon."""
    settings = make_settings(copied_url, redis_url, tmp_path)
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
        yield Running(f"http://127.0.0.1:{port}", user, spare, node, tmp_path)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def check(running: Running, key: NewKeyObject, *options: str) -> None:
    """Run schemathesis on the service; its report is the failure's text."""
    # The document is made when it is first asked for, which schemathesis would not wait for.
    httpx.get(f"{running.url}/openapi.json", timeout=120).raise_for_status()
    command = [
        str(Path(sys.executable).with_name("st")),
        *("--config-file", str(CONFIG)),
        *("run", f"{running.url}/openapi.json"),
        *("--checks", "all", "--warnings", "off", "--suppress-health-check", "all"),
        *options,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(REPOSITORY), str(REPOSITORY / "api"), os.environ.get("PYTHONPATH", "")]
        ),
        "OCTRAIN_TEST_KEY": key.key,
        "OCTRAIN_TEST_KEY_ID": key.id,
        "OCTRAIN_TEST_SPARE_ID": running.spare.id,
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        command, env=environment, cwd=running.folder, capture_output=True, text=True, check=False
    )
    report = os.environ.get("OCTRAIN_CONTRACT_REPORT")
    if report:
        with Path(report).open("a") as file:
            file.write(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    # A key that a generated request had ended would have been refused everything since.
    own = httpx.get(f"{running.url}/v1/keys/self", headers={"Authorization": f"Bearer {key.key}"})
    assert own.is_success


USERS = ("--exclude-tag", "workers")
NODES = ("--include-tag", "workers")
SHORT = ("--phases", "examples,fuzzing", "--max-examples", "1")


def test_users_operations_in_short(running: Running) -> None:
    check(running, running.user, *USERS, *SHORT)


def test_nodes_operations_in_short(running: Running) -> None:
    check(running, running.node, *NODES, *SHORT)


@pytest.mark.slow
def test_users_operations_at_their_limits(running: Running) -> None:
    """Each limit that the document tells, kept and passed."""
    check(running, running.user, *USERS, "--phases", "coverage", "--max-time", "60")


@pytest.mark.slow
def test_operations_after_one_another(running: Running) -> None:
    """Along the links between operations: what was made is there, and gone when it was deleted."""
    check(
        running,
        running.user,
        *USERS,
        *("--phases", "stateful", "--max-examples", "10", "--max-time", "15"),
    )
