"""A cancelled job: the right state at every moment of its life, and nothing of it left running."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from octrain.local.processes import descendants, is_alive

pytestmark = pytest.mark.e2e

STUBBORN = Path(__file__).with_name("stubborn_trainer.py")


@pytest.fixture(scope="module")
def stubborn(service):
    """The service with one node that takes jobs, whose trainers ignore SIGTERM; they import
    nothing, so that jobs start at once."""
    others = service.client.nodes()
    for node in others:
        service.http.post(f"/v1/nodes/{node.id}/drain").raise_for_status()
    service.stack.start_worker(
        "stubborn",
        environment={
            "OCTRAIN_TRAINER_COMMAND": f"{sys.executable} {STUBBORN}",
            "OCTRAIN_WORKER_CPU_SLOTS": "1",
            "OCTRAIN_WORKER_SPARE_DELAY_SECONDS": "0",
            "OCTRAIN_SUPERVISOR_LEFTOVER_GRACE_SECONDS": "0.5",
        },
    )
    service.until(
        lambda: any(node.name == "stubborn" and node.live for node in service.client.nodes()),
        "the stubborn node is live",
    )
    yield service
    # It is thought to live for a while yet, and must get no job in that time.
    (node,) = (node for node in service.client.nodes() if node.name == "stubborn")
    service.http.post(f"/v1/nodes/{node.id}/drain").raise_for_status()
    service.stack.process("worker-stubborn").stop(10.0)
    for node in others:
        service.http.post(f"/v1/nodes/{node.id}/undrain").raise_for_status()


def family(service, job) -> list[int]:
    """The processes of the job's trainer, all of which are up."""
    path = service.attempt_folder(job, "stubborn") / "work" / "family"
    service.until(
        lambda: path.exists() and len(path.read_text().split()) == 4, "the whole family is up", 30
    )
    return [int(word) for word in path.read_text().split()]


def statuses(service, job) -> list[str]:
    return [e["data"]["to"] for e in service.events(job.id) if e["kind"] == "status"]


@pytest.mark.parametrize("name", ["training", "mute"])
def test_nothing_lives_when_it_says_cancelled(stubborn, name):
    """``training``: cancelled while running. ``mute``: while starting, claimed by a supervisor."""
    job = stubborn.submit(name, limits={"cancel_deadline_seconds": 1})
    wanted = "starting" if name == "mute" else "running"
    stubborn.until(
        lambda: job.refresh().status == wanted and job.data.attempts[0].started_at, wanted, 30
    )
    processes = family(stubborn, job)
    supervisor = stubborn.supervisor(job, "stubborn")
    assert set(processes) <= set(descendants(supervisor))
    assert all(is_alive(pid) for pid in processes)
    assert len({os.getsid(pid) for pid in processes}) > 1

    assert job.cancel().status == "cancelling"
    assert job.cancel().status == "cancelling", "twice is as good as once"
    stubborn.until(lambda: job.refresh().is_final, "it ends", 30)
    # Looked at in the moment in which the service says so.
    assert [pid for pid in processes if is_alive(pid)] == []
    assert descendants(supervisor) == []

    assert (job.status, job.data.reason) == ("cancelled", "cancelled_by_user")
    assert "did not end in time and was killed" in (job.data.attempts[0].detail or "")
    began = ["queued", "starting"] + ["running"] * (name == "training")
    assert statuses(stubborn, job) == [*began, "cancelling", "cancelled"]
    version = job.data.version
    assert job.cancel().status == "cancelled", "after the end it changes nothing"
    assert job.data.version == version


def test_the_node_takes_the_next_job_after_a_stubborn_one(stubborn):
    for _ in range(2):
        job = stubborn.submit("training", limits={"cancel_deadline_seconds": 1})
        stubborn.until(lambda job=job: job.refresh().status == "running", "it runs", 30)
        job.cancel()
        stubborn.end(job, "cancelled")


def test_a_job_in_the_queue_is_cancelled_at_once(stubborn):
    running = stubborn.submit("training", limits={"cancel_deadline_seconds": 1})
    stubborn.until(lambda: running.refresh().status == "running", "it runs", 30)
    waiting = stubborn.submit("waiting")
    assert waiting.cancel().status == "cancelled"
    assert waiting.data.attempts == []
    assert statuses(stubborn, waiting) == ["queued", "cancelled"]
    running.cancel()
    stubborn.end(running, "cancelled")
    assert waiting.refresh().data.attempts == [], "nothing was started for it"


def test_a_placed_job_that_no_supervisor_has_claimed_is_cancelled_at_once(stubborn):
    worker = stubborn.stack.process("worker-stubborn").pid
    os.kill(worker, signal.SIGSTOP)  # the node takes no message, and is still thought to live
    try:
        job = stubborn.submit("training")
        stubborn.until(lambda: job.refresh().status == "starting", "it is placed", 20)
        assert job.data.attempts[0].started_at is None
        assert job.cancel().status == "cancelled"
    finally:
        os.kill(worker, signal.SIGCONT)
    # The message arrives late: its attempt is over, so nothing may come of it.
    following = stubborn.submit("training", limits={"cancel_deadline_seconds": 1})
    stubborn.until(lambda: following.refresh().status == "running", "the next one runs", 60)
    following.cancel()
    stubborn.end(following, "cancelled")
    assert job.refresh().status == "cancelled"
    assert [attempt.status for attempt in job.data.attempts] == ["ended"]
    assert not (stubborn.attempt_folder(job, "stubborn") / "started.json").exists()
