"""The running service keeps what its OpenAPI document says: every check of schemathesis.

What it is told is in schemathesis.toml and contract_hooks.py. No operation is left out; where a
check is, one of contract_hooks.py takes its place. (Checks named on the command line would go
before what the file says of them; all are on by themselves.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from octrain_api.keys.schemas import NewKeyObject
from tests.api.served import Running, served

# Each is many requests: a busy machine may take long over them.
pytestmark = pytest.mark.timeout(900)

CONFIG = Path(__file__).with_name("schemathesis.toml")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def running(copied_url: str, redis_url: str, tmp_path: Path) -> Iterator[Running]:
    """The service on a port of its own."""
    with served(copied_url, redis_url, tmp_path) as service:
        yield service


def check(running: Running, key: NewKeyObject, *options: str) -> None:
    """Run schemathesis on the service; its report is the failure's text."""
    # The document is made when it is first asked for, which schemathesis would not wait for.
    httpx.get(f"{running.url}/openapi.json", timeout=120).raise_for_status()
    ran = running.folder / "ran.json"
    command = [
        str(Path(sys.executable).with_name("st")),
        *("--config-file", str(CONFIG)),
        *("run", f"{running.url}/openapi.json"),
        *("--warnings", "off", "--suppress-health-check", "all", "--report-json-path", str(ran)),
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
    # On a busy machine the time may be over before the first request.
    assert json.loads(ran.read_text())["test_cases"]["generated"] > 0, done.stdout
    # A key that a generated request had ended would have been refused everything since.
    authorization = {"Authorization": f"Bearer {key.key}"}
    own = httpx.get(f"{running.url}/v1/keys/self", headers=authorization, timeout=120)
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
def test_nodes_operations_at_their_limits(running: Running) -> None:
    check(running, running.node, *NODES, "--phases", "coverage", "--max-time", "60")


@pytest.mark.slow
def test_operations_after_one_another(running: Running) -> None:
    """Along the links between operations: what was made is there, and gone when it was deleted."""
    check(
        running,
        running.user,
        *USERS,
        *("--phases", "stateful", "--max-examples", "10", "--max-time", "30"),
    )
