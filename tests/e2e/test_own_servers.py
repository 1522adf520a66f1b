"""`octrain up` with servers of one's own: DATABASE_URL and REDIS_URL are used, none is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis

from octrain.client import Client
from octrain.local.leftovers import processes_of
from octrain.local.processes import servers_in
from octrain.local.servers import LocalServers
from octrain.local.state import StackState
from tests.chaos import trainer as scripted
from tests.chaos.users import job_spec

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_up_uses_the_servers_that_are_named(tmp_path: Path) -> None:
    data, root = tmp_path / "data", tmp_path / "root"
    root.mkdir()
    (root / "corpus.txt").write_text("a text\n" * 400)
    kind, _, spec = job_spec(0)
    assert kind == "scripted"
    spec["training"]["steps"] = 30
    with LocalServers(tmp_path / "servers") as servers:
        database = servers.create_database("of_the_user")
        environment = {
            **{name: value for name, value in os.environ.items() if "OCTRAIN" not in name},
            "DATABASE_URL": database,
            "REDIS_URL": servers.redis_url,
            "OCTRAIN_TRAINER_COMMAND": f"{sys.executable} {scripted.__file__}",
            "COLUMNS": "200",
        }
        command = ("-m", "octrain", "up", "--data-dir", str(data), "--root", str(root))
        up = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        try:
            assert up.stdout is not None
            text = ""
            for line in up.stdout:
                text += line
                if "Octrain is ready" in line:
                    break
            assert "Octrain is ready" in text, text
            state = StackState.load(data)
            with Client(state.api.url, state.api.key) as client:
                job = client.jobs.create(spec).wait(120)
            assert job.status == "succeeded", job.data.detail
            with psycopg.connect(database) as connection:
                rows = connection.execute("SELECT id, status FROM jobs").fetchall()
            assert rows == [(job.id, "succeeded")]
            with redis.Redis.from_url(servers.redis_url) as broker:
                assert broker.client_list(), "the controller and the worker are its clients"
            assert _servers_of(data) == []
            assert not (data / "postgres").exists()
            assert not (data / "valkey").exists()
        finally:
            up.send_signal(signal.SIGTERM)
            up.communicate(timeout=60)
        assert up.returncode == 0
        assert processes_of(data) == []
        # They are not ours to stop.
        with psycopg.connect(database) as connection:
            connection.execute("SELECT 1")
        with redis.Redis.from_url(servers.redis_url) as broker:
            assert broker.ping()


def _servers_of(data: Path) -> list[int]:
    found = servers_in(data / "postgres", "postgres") + servers_in(data / "valkey", "valkey")
    for pid in processes_of(data):
        name = Path(f"/proc/{pid}/comm").read_text()
        if "postgres" in name or "valkey" in name:
            found.append(pid)
    return found
