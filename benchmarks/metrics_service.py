"""The service that the benchmark of metrics measures, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from servers import running

from octrain.local.ports import free_port
from octrain.local.servers import LocalServers

REPOSITORY = Path(__file__).parents[1]


@contextmanager
def service(servers: LocalServers, folder: Path) -> Iterator[tuple[str, str, str]]:
    """The API and the controller as processes: the API's URL, a user's key and a node's key."""
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "api")]),
        "DATABASE_URL": servers.postgres_url,
        "REDIS_URL": servers.redis_url,
        "OCTRAIN_ARTIFACT_URL": folder.as_uri(),
        "OCTRAIN_RATE_LIMIT_READ": "0",
        "OCTRAIN_RATE_LIMIT_WORKER": "0",
    }
    command = [sys.executable, "-m", "octrain_api"]
    keys = [
        json.loads(
            subprocess.run(
                [*command, "create-key", "--name", "b", "--owner", "o", "--scopes", scopes],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )["key"]
        for scopes in ("jobs:read,jobs:write", "node")
    ]
    with (folder / "service.log").open("w") as log:
        processes = [
            subprocess.Popen([*command, *rest], env=environment, stderr=log)
            for rest in (["serve", "--port", str(port)], ["controller"])
        ]
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: httpx.get(f"{url}/healthz").status_code == 200)
            yield url, keys[0], keys[1]
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


@contextmanager
def bare_row(postgres_url: str) -> Iterator[str]:
    """The bare GET of `benchmarks/polling.py` on this database: its host:port."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "polling.py"), "--bare"]
    with running(command, {**os.environ, "DATABASE_URL": postgres_url}) as address:
        yield address


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise SystemExit("a server did not come up, or did not finish, in time")
