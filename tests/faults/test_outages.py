"""Outages of the length that users see, and a disk with no room left."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from octrain.local.processes import is_alive
from tests.small_disk import NoSmallDisk, small_disk

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_api_is_away(service):
    """Training goes on without it for a minute, longer than a node may be silent, and what was not
    heard meanwhile is told afterwards. See ``tests/e2e/test_kills.py`` for a shorter time."""
    away, steps = 60, 100_000
    job = service.submit("api-killed", training={"steps": steps})
    service.step(job, 20)
    trainer = service.trainer(job)
    process = service.stack.process("api")
    os.kill(process.pid, signal.SIGKILL)
    gone = time.monotonic()
    reached = [service.local_step(job)]

    def trains_on() -> bool:
        if not process.running and service.local_step(job) > reached[-1]:
            reached.append(service.local_step(job))
        return time.monotonic() - gone > away and len(reached) > 10

    service.until(trains_on, "training goes on without the API", away + 60)
    service.stack.restart("api")
    service.until(service.stack.is_ready, "the API answers again", 30)
    service.until(lambda: job.refresh().data.progress.step > reached[-1], "it is told the rest")
    assert is_alive(trainer)
    assert job.status == "running"
    assert [attempt.number for attempt in job.data.attempts] == [1]
    job.cancel()
    service.end(job, "cancelled")
    (series,) = job.metrics("train/loss")
    assert series.steps == list(range(1, series.steps[-1] + 1)), "twice, or left out"
    assert series.steps[-1] > reached[-1]
    kinds = {event["kind"] for event in service.events(job.id)}
    assert "api_was_unreachable" in kinds


def test_the_disk_of_a_node_is_full(start_service, tmp_path):
    """The job says so; what it had written goes, and the node takes the next job."""
    with contextlib.ExitStack() as mounts:
        try:
            folder = mounts.enter_context(small_disk(tmp_path / "small-disk", 8 << 20))
        except NoSmallDisk as error:
            pytest.skip(f"no tmpfs may be mounted here: {error}")
        made = start_service(
            "full-disk",
            {
                "OCTRAIN_WORKER_SPARE_DELAY_SECONDS": "0.5",
                "OCTRAIN_CONTROLLER_HEARTBEAT_INTERVAL": "1",
                "OMP_NUM_THREADS": "1",
            },
            workers=[],
        )
        place = made.stack.worker_data_dir("small")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(folder)
        made.stack.worker_names = ["small"]
        made.stack.start_worker("small")
        assert made.stack.wait_for_nodes()
        mounts.callback(made.stack.stop)
        greedy = made.submit(
            "greedy",
            training={"steps": 100_000},
            checkpoint={"every_steps": 5, "keep_last": 1000, "keep_best": 0},
        )
        made.end(greedy, "failed", 240)
        assert greedy.data.reason == "storage_full", greedy.data.detail
        assert "full" in (greedy.data.detail or "").lower() or "space" in greedy.data.detail
        made.end(made.submit("modest"), "succeeded", 240)
