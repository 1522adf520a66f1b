"""What the server's commands say where their surroundings are not as they should be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError, ProgrammingError

from octrain_api.faults import told
from octrain_api.migrate import migrations_folder

REPOSITORY = migrations_folder().parent
COMMANDS = {
    "serve": ["serve", "--port", "0"],
    "controller": ["controller"],
    "migrate": ["migrate"],
    "create-key": ["create-key", "--name", "n", "--owner", "o", "--scopes", "admin"],
    "create-node-token": ["create-node-token", "--owner", "o"],
}
every_command = pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octrain_api", *arguments],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "api")]),
            "OCTRAIN_ARTIFACT_URL": folder.as_uri(),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def port_of_nobody() -> Iterator[int]:
    """Held, so that no other program takes it, but nobody listens there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@every_command
def test_a_database_that_is_away(arguments: list[str], port_of_nobody: int, tmp_path: Path) -> None:
    url = f"postgresql://octrain:hidden@127.0.0.1:{port_of_nobody}/octrain"
    ended = run(arguments, tmp_path, DATABASE_URL=url)
    assert ended.returncode == 1
    assert ended.stdout == ""
    said = ended.stderr.strip().splitlines()
    assert len(said) == 1, ended.stderr
    assert said[0].startswith("The database cannot be used. DATABASE_URL tells where it is. ")
    assert str(port_of_nobody) in said[0]
    assert "hidden" not in ended.stderr


def test_a_database_that_does_not_know_us(postgres_url: str, tmp_path: Path) -> None:
    stranger = postgres_url.rpartition("/")[0] + "/no_such_database"
    ended = run(COMMANDS["serve"], tmp_path, DATABASE_URL=stranger)
    assert ended.returncode == 1
    assert 'database "no_such_database" does not exist' in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["create-key", "create-node-token"])
def test_a_database_without_a_schema(name: str, fresh_postgres_url: str, tmp_path: Path) -> None:
    ended = run(COMMANDS[name], tmp_path, DATABASE_URL=fresh_postgres_url)
    assert ended.returncode == 3
    assert "has no schema yet" in ended.stderr
    assert "Run `octrain migrate`" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"DATABASE_URL": "mysql://u:hidden@db/octrain"}, "must be a postgresql:// URL"),
        ({"DATABASE_URL": "postgresql://u:hidden@db:port/octrain"}, "its port no number"),
        (
            {"DATABASE_URL": "postgresql://u:hidden@db/octrain", "OCTRAIN_DATABASE_POOL_SIZE": "x"},
            "DatabaseSettings, pool_size: ",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, str], named: str, tmp_path: Path) -> None:
    ended = run(COMMANDS["migrate"], tmp_path, **settings)
    assert ended.returncode == 2
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "hidden" not in ended.stderr


def test_a_database_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    fault = told(OperationalError("SELECT 1", {}, Exception("nobody\n  listens")))
    assert fault == (
        "The database cannot be used. Set DATABASE_URL to a Postgres, as "
        "postgresql://user@host/database. It was said: nobody listens",
        1,
    )


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    assert told(KeyError("x")) is None
    assert told(ProgrammingError("SELECT nothing", {}, Exception("no such column"))) is None
