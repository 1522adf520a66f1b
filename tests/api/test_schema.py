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

from octrain_api.migrate import (
    MIGRATION_LOCK,
    alembic_config,
    head_revision,
    migrate,
    migrations_folder,
)
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


_FIRST_ROWS = [
    "INSERT INTO nodes (id, name, owner, boot_id, hostname, version, device_kinds, cpu_slots, "
    "gpus, engines, roots, private_roots) VALUES ('node_1', 'n', 'o', 'b', 'h', '1', '{cpu}', 1, "
    "'[]', '{}', '{}', true), ('node_2', 'm', 'o', 'b', 'h', '1', '{cpu}', 1, '[]', '{}', '{}', "
    "false)",
    "INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, attempt, "
    "cancel_deadline_at, waiting_for) SELECT 'job_' || n, 'o', '{}', '', 0, "
    """'{"resources": {"device": "auto", "gpus": 2}, "recipe": {"engine": "emulated"}, "limits": """
    """{"lease_ttl_seconds": 900, "max_restarts": 3, "cancel_deadline_seconds": 9}}', """
    "(ARRAY['queued', 'running', 'cancelling'])[n], 1, "
    "CASE WHEN n = 3 THEN now() END, CASE WHEN n = 1 THEN 'a free CPU slot' END "
    "FROM generate_series(1, 3) AS n",
    "INSERT INTO attempts (id, job_id, number, node_id, status, fencing_token, device, "
    "gpu_indices, lease_seconds, ended_at) SELECT 'att_' || n, 'job_' || n, 1, "
    "'node_' || least(n, 2), (ARRAY['ended', 'running', 'running'])[n], n, 'cpu', '{}', 900, "
    "CASE WHEN n = 1 THEN now() END FROM generate_series(1, 3) AS n",
    "INSERT INTO artifacts (id, job_id, attempt_id, attempt, kind, name, step, best, url, size, "
    "files) SELECT 'art_' || n, 'job_' || n, 'att_' || n, 1, 'checkpoint', 's', 5, false, 'file:', "
    "1, '[]' FROM generate_series(1, 2) AS n",
    "INSERT INTO metric_series (job_id, name, attempt) VALUES ('job_1', 'train/loss', 1)",
    "INSERT INTO metric_chunks (series_id, seq, job_id, steps, values) "
    "SELECT id, 1, 'job_1', '{1,2}', '{0.5,NaN}' FROM metric_series",
    "INSERT INTO events (job_id, seq, kind, actor, message, data) "
    "VALUES ('job_1', 2, 'status', 'user:o', 'Submitted.', '{}')",
]


def _rows(engine: Engine, query: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


def test_up_down_and_up_again_with_data(engine: Engine, fresh_postgres_url: str) -> None:
    """Jobs, attempts and metrics of the first schema live through every later one and back."""
    settings = DatabaseSettings(url=fresh_postgres_url)
    migrate(settings, "0001")
    with engine.begin() as connection:
        for statement in _FIRST_ROWS:
            connection.execute(text(statement))
    kept = {
        "attempts": "SELECT id, job_id, status, fencing_token FROM attempts ORDER BY id",
        "events": "SELECT job_id, seq, message FROM events",
        "jobs": "SELECT id, status, spec FROM jobs ORDER BY id",
    }
    points = "SELECT steps, CAST(values AS text[]) FROM metric_chunks"
    points_before = _rows(engine, points)
    before = {name: _rows(engine, query) for name, query in kept.items()}
    migrate(settings)
    # What became of the points is told by the tests of the metrics.
    assert _rows(engine, "SELECT sum(points) FROM metric_batches") == [(2,)]
    assert {name: _rows(engine, query) for name, query in kept.items()} == before
    tables = set(inspect(engine).get_table_names())
    assert {"jobs", "attempts", "events", "outbox", "nodes", "queue_groups"} <= tables
    assert _rows(engine, "SELECT need FROM jobs ORDER BY id") == [
        ("auto:2:emulated@node_1",),
        ("auto:2:emulated",),
        ("auto:2:emulated",),
    ]
    assert _rows(engine, "SELECT id FROM jobs WHERE stop_deadline_at IS NOT NULL") == [("job_3",)]
    assert _rows(engine, "SELECT id FROM attempts WHERE progress_at IS NOT NULL ORDER BY id") == [
        ("att_2",),
        ("att_3",),
    ]
    assert _rows(engine, "SELECT cpu_slots FROM attempts ORDER BY id") == [(0,), (2,), (2,)]
    _alembic(engine, "downgrade", "0001")
    assert _rows(engine, points) == points_before
    assert {name: _rows(engine, query) for name, query in kept.items()} == before
    assert _rows(engine, "SELECT waiting_for FROM jobs WHERE status = 'queued'") == [
        ("the scheduler",)
    ]
    migrate(settings)
    migrate(settings)
    assert {name: _rows(engine, query) for name, query in kept.items()} == before
    _alembic(engine, "check")
    _alembic(engine, "downgrade", "base")
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    assert inspect(engine).get_sequence_names() == []
    migrate(settings)
    assert set(inspect(engine).get_table_names()) == tables


def test_an_older_and_a_newer_schema_are_refused(
    engine: Engine, fresh_postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    environment = _environment(fresh_postgres_url, redis_url, tmp_path)
    migrate(DatabaseSettings(url=fresh_postgres_url), "0001")
    older = _run(environment, "serve", "--port", "0")
    assert (older.returncode, "has schema 0001" in older.stderr) == (3, True), older.stderr
    assert "Run `octrain migrate`" in older.stderr
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    newer = _run(environment, "controller")
    assert (newer.returncode, "has schema 9999" in newer.stderr) == (3, True), newer.stderr


def test_a_migration_waits_for_the_lock(engine: Engine, fresh_postgres_url: str) -> None:
    settings = DatabaseSettings(url=fresh_postgres_url)
    with engine.connect() as holder, ThreadPoolExecutor(1) as pool:
        holder.execute(text("SELECT pg_advisory_lock(:key)"), {"key": MIGRATION_LOCK})
        running = pool.submit(migrate, settings)
        while not _rows(engine, "SELECT 1 FROM pg_locks WHERE NOT granted"):
            assert not running.done()
            time.sleep(0.02)
        assert inspect(engine).get_table_names() == []
        holder.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": MIGRATION_LOCK})
        running.result(60)
    assert "jobs" in inspect(engine).get_table_names()


def test_the_models_and_the_migrations_agree(engine: Engine, fresh_postgres_url: str) -> None:
    migrate(DatabaseSettings(url=fresh_postgres_url))
    _alembic(engine, "check")


def test_events_of_another_server_come_before_all_others(
    engine: Engine, fresh_postgres_url: str
) -> None:
    """A restored dump brings numbers of transactions that this server has yet to reach."""
    settings = DatabaseSettings(url=fresh_postgres_url)
    migrate(settings)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, need) "
                "VALUES ('job_1', 'o', '{}', '', 0, '{}', 'queued', '')"
            )
        )
        connection.execute(
            text(
                "INSERT INTO events (job_id, seq, kind, actor, message, data, transaction_id) "
                "VALUES ('job_1', 1, 'a', 'b', 'c', '{}', 4000000000000)"
            )
        )
        connection.execute(
            text(
                "INSERT INTO events (job_id, seq, kind, actor, message, data) "
                "VALUES ('job_1', 2, 'a', 'b', 'c', '{}')"
            )
        )
    [(own,)] = _rows(engine, "SELECT transaction_id FROM events WHERE seq = 2")
    assert own > 0
    migrate(settings)
    assert _rows(engine, "SELECT seq, transaction_id FROM events ORDER BY seq") == [
        (1, 0),
        (2, own),
    ]


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
