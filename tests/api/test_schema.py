"""Migrations: up and down with data, in step with the models, and the refusal of a wrong schema."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from alembic import command
from sqlalchemy import Engine, create_engine, inspect, text

from octrain_api.migrate import alembic_config, head_revision, migrate, migrations_folder
from octrain_api.settings import DatabaseSettings

REPOSITORY = migrations_folder().parent


@pytest.fixture
def engine(fresh_postgres_url: str) -> Any:
    engine = create_engine(DatabaseSettings(url=fresh_postgres_url).sqlalchemy_url)
    yield engine
    engine.dispose()


def _alembic(engine: Engine, name: str, *arguments: str) -> None:
    with engine.connect() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        getattr(command, name)(config, *arguments)
        connection.commit()


def test_up_down_and_up_again_with_data(engine: Engine, fresh_postgres_url: str) -> None:
    settings = DatabaseSettings(url=fresh_postgres_url)
    migrate(settings)
    tables = set(inspect(engine).get_table_names())
    assert {"jobs", "attempts", "events", "outbox", "nodes", "metric_chunks"} <= tables
    insert = text(
        "INSERT INTO jobs (id, owner, labels, notes, priority, spec, status) "
        "VALUES ('job_1', 'o', '{}', '', 0, '{}', 'queued')"
    )
    with engine.begin() as connection:
        connection.execute(insert)
    migrate(settings)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM jobs")) == 1
    _alembic(engine, "downgrade", "base")
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    assert inspect(engine).get_sequence_names() == []
    migrate(settings)
    assert set(inspect(engine).get_table_names()) == tables


def test_the_models_and_the_migrations_agree(engine: Engine, fresh_postgres_url: str) -> None:
    migrate(DatabaseSettings(url=fresh_postgres_url))
    _alembic(engine, "check")


def test_many_may_migrate_at_once(engine: Engine, fresh_postgres_url: str) -> None:
    settings = DatabaseSettings(url=fresh_postgres_url)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: migrate(settings), range(4)))
    with engine.connect() as connection:
        revision = connection.scalar(text("SELECT version_num FROM alembic_version"))
    assert revision == head_revision()


def _environment(url: str, redis_url: str, folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "api")])
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": path,
        "DATABASE_URL": url,
        "REDIS_URL": redis_url,
        "OCTRAIN_ARTIFACT_URL": folder.as_uri(),
    }


def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octrain_api", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_commands_from_an_empty_database_to_a_clean_end(
    fresh_postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    environment = _environment(fresh_postgres_url, redis_url, tmp_path)
    for name in ("serve", "controller"):
        refused = _run(environment, name, *(["--port", "0"] if name == "serve" else []))
        assert refused.returncode == 3
        assert "Run `octrain migrate`" in refused.stderr
    assert _run(environment, "migrate").returncode == 0
    assert (
        _run(environment, "create-key", "--name", "n", "--owner", "o", "--scopes", "x").returncode
        == 2
    )
    made = _run(
        environment, "create-key", "--name", "n", "--owner", "o", "--scopes", "jobs:read,jobs:write"
    )
    key = json.loads(made.stdout)
    assert key["id"].startswith("key_")
    log_path = tmp_path / "controller.log"
    log = log_path.open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "octrain_api", "serve", "--port", "0"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    controller = subprocess.Popen(
        [sys.executable, "-m", "octrain_api", "controller"], env=environment, stderr=log
    )
    try:
        assert server.stderr is not None
        address = ""
        for line in server.stderr:
            if "running on http://" in line:
                address = "http://" + line.split("http://")[1].split()[0]
                break
        with httpx.Client(
            base_url=address, headers={"Authorization": f"Bearer {key['key']}"}, timeout=30
        ) as client:
            from octrain_api.jobs.schemas import EXAMPLE_SPEC

            job_id = client.post("/jobs", json=EXAMPLE_SPEC).json()["id"]
            # An open stream does not keep the server from ending.
            with client.stream("GET", f"/jobs/{job_id}/stream") as stream:
                lines = stream.iter_lines()
                assert any(line == "event: status" for line in lines)
                server.send_signal(signal.SIGTERM)
                list(lines)
        assert server.wait(20) in (0, -signal.SIGTERM)
        while "this controller leads" not in log_path.read_text():
            assert controller.poll() is None
            time.sleep(0.05)
        controller.send_signal(signal.SIGTERM)
        assert controller.wait(20) == 0
    finally:
        for process in (server, controller):
            if process.poll() is None:
                process.kill()
                process.wait()
        assert server.stderr is not None
        server.stderr.close()
        log.close()
