"""`octrain up` beside what its user has already: Postgres, Redis and a collector of traces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg
import pytest
import redis

from octrain.client import Client
from octrain.local.leftovers import processes_of
from octrain.local.processes import servers_in
from octrain.local.servers import LocalServers
from octrain.local.state import StackState
from tests.otlp import Collector, attributes
from tests.running_service import corpus, tiny_spec

pytestmark = pytest.mark.e2e

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
NAMES = {
    "POST /jobs",
    "relay",
    "run attempt",
    "claim request",
    "POST /attempts/{attempt_id}/claim",
    "claim",
    "prepare",
    "start trainer",
    "trainer loading",
    "trainer converting",
    "trainer training",
    "first step",
}


@dataclass
class Own:
    """A running `octrain up`, and what its user had before."""

    data: Path
    root: Path
    up: subprocess.Popen[str]
    state: StackState
    database: str
    redis_url: str
    collector: Collector


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    folder = tmp_path_factory.mktemp("own")
    data, root = folder / "data", corpus(folder / "root")
    collector = Collector()
    with LocalServers(folder / "servers") as servers:
        database = servers.create_database("of_the_user")
        environment = {
            **{name: value for name, value in os.environ.items() if "OCTRAIN" not in name},
            "DATABASE_URL": database,
            "REDIS_URL": servers.redis_url,
            "OCTRAIN_TRACING_ENDPOINT": collector.endpoint,
            # Sent soon, so that the test need not wait for the usual five seconds.
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        # Any port: the usual one is that of a stack which the person at this machine may run.
        options = ("--data-dir", str(data), "--root", str(root), "--port", "0")
        up = subprocess.Popen(
            [sys.executable, "-m", "octrain", "up", *options],
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
                if "Nodes ready" in line:
                    break
            assert "Nodes ready" in text, text
            state = StackState.load(data)
            yield Own(data, root, up, state, database, servers.redis_url, collector)
        finally:
            if up.poll() is None:
                up.send_signal(signal.SIGTERM)
                up.communicate(timeout=60)
            collector.close()


def test_one_trace_from_the_submission_to_the_first_step(own: Own) -> None:
    """Over placing, broker and node, in the collector that was named."""
    key = own.state.api.key
    with Client(own.state.api.url, key) as client:
        made = httpx.post(
            f"{own.state.api.url}/v1/jobs",
            json=tiny_spec("traced", notes="not-for-traces"),
            headers={
                "Authorization": f"Bearer {key}",
                "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
            },
            trust_env=False,
        )
        assert made.status_code == 201, made.text
        job = client.jobs.get(made.json()["id"]).wait(120)
    assert job.status == "succeeded", job.data.detail
    collector = own.collector
    collector.until(lambda spans: set(spans) >= NAMES)
    spans = collector.of_trace(TRACE)
    by_id = {span.span_id: span for span in spans}
    (request,) = [span for span in spans if span.name == "POST /jobs"]
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    for span in spans:
        if span is not request:
            assert span.parent_span_id in by_id, f"{span.name} hangs in the air"
    (attempt,) = [span for span in spans if span.name == "run attempt"]
    assert attempt.parent_span_id == request.span_id
    assert attributes(attempt)["octrain.job_id"] == job.id
    (answer,) = [span for span in spans if span.name == "POST /attempts/{attempt_id}/claim"]
    # The request of the claim was made below the node's span: its context came with the message.
    assert answer.parent_span_id == attempt.span_id
    (first,) = [span for span in spans if span.name == "first step"]
    assert first.end_time_unix_nano > request.start_time_unix_nano
    sent = b"".join(collector.bodies)
    secrets = [key, "oct_", "octn_", "postgresql", "redis://", str(own.root)]
    for secret in [*secrets, "not-for-traces", "corpus.txt"]:
        assert secret.encode() not in sent, secret


def test_the_servers_that_are_named_are_used_and_left_alone(own: Own) -> None:
    with Client(own.state.api.url, own.state.api.key) as client:
        job = client.jobs.create(tiny_spec("beside-them")).wait(120)
    assert job.status == "succeeded", job.data.detail
    with psycopg.connect(own.database) as connection:
        rows = connection.execute("SELECT status FROM jobs WHERE id = %s", [job.id]).fetchall()
    assert rows == [("succeeded",)]
    with redis.Redis.from_url(own.redis_url) as broker:
        assert broker.client_list(), "the controller and the worker are its clients"
    assert servers_of(own.data) == []
    assert not (own.data / "postgres").exists()
    assert not (own.data / "valkey").exists()

    own.up.send_signal(signal.SIGTERM)
    own.up.communicate(timeout=60)
    assert own.up.returncode == 0
    assert processes_of(own.data) == []
    with psycopg.connect(own.database) as connection:
        connection.execute("SELECT 1")
    with redis.Redis.from_url(own.redis_url) as broker:
        assert broker.ping()


def servers_of(data: Path) -> list[int]:
    found = servers_in(data / "postgres", "postgres") + servers_in(data / "valkey", "valkey")
    for pid in processes_of(data):
        name = Path(f"/proc/{pid}/comm").read_text()
        if "postgres" in name or "valkey" in name:
            found.append(pid)
    return found
