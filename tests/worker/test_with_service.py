"""A node and the whole service: what a job leaves in the store, and what our restart costs it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from octrain.local.processes import become_subreaper
from octrain.local.stack import LocalStack
from tests.running_service import Service, corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    become_subreaper()
    root = corpus(tmp_path / "root")
    environment = {
        "OCTRAIN_WORKER_SPARE_DELAY_SECONDS": "0.5",
        "OCTRAIN_CONTROLLER_HEARTBEAT_INTERVAL": "1",
        "OMP_NUM_THREADS": "1",
    }
    stack = LocalStack(tmp_path / "data", roots=[root], environment=environment)
    stack.start()
    running = Service(stack, root)
    try:
        assert stack.wait_for_nodes(), running.tails()
        yield running
    finally:
        running.close()
        stack.stop()


def registered(service: Service, job_id: str) -> list[dict[str, Any]]:
    answer = service.http.get(f"/v1/jobs/{job_id}/artifacts?kind=checkpoint")
    return list(answer.raise_for_status().json()["items"])


def place(artifact: dict[str, Any]) -> Path:
    return Path(artifact["url"].removeprefix("file://"))


def test_pruned_torn_and_restarted(service: Service) -> None:
    """One job: its old checkpoints leave the store; its node is restarted in order while the newest
    checkpoint is damaged; it goes on from the one before, at no cost of a restart."""
    job = service.submit(
        "long",
        training={"steps": 100_000},
        checkpoint={"every_steps": 10, "keep_last": 2, "keep_best": 0},
    )
    service.until(
        lambda: {one["step"] for one in registered(service, job.id)} - {10, 20, 30},
        "a fourth checkpoint",
    )
    first = registered(service, job.id)[-1]
    checkpoints = place(first).parent
    assert len(registered(service, job.id)) <= 2

    def due_at_once() -> None:
        """Readers of pruned checkpoints have a minute; this test has not."""
        with psycopg.connect(service.stack.database_url) as connection:
            connection.execute("UPDATE leftovers SET not_before = now() WHERE url LIKE '%/step-%'")

    def gone() -> bool:
        due_at_once()
        return not {f"step-{step:08d}" for step in (10, 20)} & set(os.listdir(checkpoints))

    service.until(gone, "the files of the first two checkpoints are removed")

    worker = service.stack.process("worker-local")
    os.kill(worker.pid, signal.SIGTERM)
    service.until(lambda: worker.popen is None or worker.popen.poll() is not None, "the node's end")
    service.until(lambda: job.refresh().status == "queued", "the job is queued again")
    *_, before, newest = registered(service, job.id)
    state = place(newest) / "state.json"
    state.write_bytes(state.read_bytes()[:-1])
    service.stack.restart("worker-local")
    service.step(job, newest["step"] + 20)

    assert [attempt.number for attempt in job.data.attempts] == [1, 2]
    assert job.data.attempts[0].reason == "stopped_by_request"
    assert job.data.restarts == 0
    events = service.events(job.id)
    (torn,) = [event for event in events if event["kind"] == "checkpoint_torn"]
    assert torn["data"] == {"artifact_id": newest["id"], "step": newest["step"]}
    (fetched,) = [event for event in events if event["kind"] == "checkpoint_fetched"]
    assert fetched["data"]["artifact_id"] == before["id"]
    with psycopg.connect(service.stack.database_url) as connection:
        rows = connection.execute("SELECT id FROM artifacts WHERE damaged").fetchall()
    assert rows == [(newest["id"],)]

    job.cancel()
    service.end(job, "cancelled")
    assert job.data.restarts == 0
