"""Faults at chosen instants, each with the one end it may have; see ``test_leases`` for those that
outlast a lease.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from octrain.local.processes import is_alive
from octrain_api.controller.relay import CelerySender
from octrain_api.nodes.service import queue_of
from octrain_api.settings import BrokerSettings
from tests.chaos.watch import TrainerWatch
from tests.faults.faulty_nodes import Nodes, exact, stops, succeeds, trainers_of
from tests.running_service import is_idle

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("refuse", marks=pytest.mark.slow),
        pytest.param("reset", marks=pytest.mark.slow),
        "blackhole",
    ],
)
def test_a_network_cut_below_the_lease(nodes: Nodes, watch: TrainerWatch, how: Any) -> None:
    """Training goes on in the same attempt, and all of it is told afterwards."""
    nodes.only("near")
    job = nodes.running_on("near", f"cut-{how}")
    trainer = nodes.service.trainer(job, "near")
    nodes.proxies["near"].become(how)
    try:
        reached = nodes.service.local_step(job, "near")
        nodes.service.until(
            lambda: nodes.service.local_step(job, "near") > reached + 50, "it trains on"
        )
        # What the API knows stands still meanwhile: the cut is one.
        assert job.refresh().data.progress.step <= reached
    finally:
        nodes.proxies["near"].become("pass")
    nodes.service.until(lambda: job.refresh().data.progress.step > reached + 50, "it is told")
    assert is_alive(trainer)
    assert [attempt.status for attempt in job.data.attempts] == ["running"]
    assert job.data.restarts == 0
    stops(nodes, job)


def test_a_message_delivered_many_times(nodes: Nodes, watch: TrainerWatch) -> None:
    """While the job runs and after its end: one attempt, one supervisor, one trainer."""
    nodes.only("near")
    job = nodes.running_on("near", "many-messages")
    attempt = job.data.attempts[-1]
    sender = CelerySender(BrokerSettings(url=nodes.service.stack.redis_url))
    payload = {"job_id": job.id, "attempt_id": attempt.id, "attempt": attempt.number}

    def deliver(copies: int) -> None:
        for copy in range(copies):
            sender.send(queue_of(nodes.node("near")["id"]), f"copy-{copy}", payload)

    try:
        supervisor, trainer = nodes.service.supervisor(job, "near"), trainers_of(nodes, job)
        deliver(5)
        witness = nodes.submit("behind-the-copies", steps=20)
        succeeds(nodes, witness)  # its message came after the copies
        assert nodes.service.supervisor(job, "near") == supervisor
        assert trainers_of(nodes, job) == trainer
        assert [a.status for a in job.refresh().data.attempts] == ["running"]
        stops(nodes, job)
        version = job.data.version
        deliver(3)
        succeeds(nodes, nodes.submit("behind-the-late-copies", steps=20))
        assert job.refresh().data.version == version
        assert trainers_of(nodes, job) == []
    finally:
        sender.close()


def test_a_worker_that_is_alive_and_takes_no_message(nodes: Nodes) -> None:
    """Its node was heard until then, so the job is placed there; and then elsewhere."""
    worker = nodes.service.stack.process("worker-near").pid
    nodes.only()
    job = nodes.submit("not-taken", steps=50)
    os.kill(worker, signal.SIGSTOP)
    try:
        nodes.only("near")
        nodes.service.until(lambda: job.refresh().data.attempts, "it is placed")
        assert job.data.attempts[0].node == "near"
        nodes.only("near", "far")
        succeeds(nodes, job)
    finally:
        os.kill(worker, signal.SIGCONT)
    *before, last = job.data.attempts
    assert {(one.node, one.reason) for one in before} == {("near", "undelivered")}
    assert (last.node, last.reason) == ("far", "completed")
    assert job.data.restarts == 0
    nodes.service.until(lambda: nodes.node("near")["live"], "the node is heard again")


def test_pause_frees_the_node_and_resume_goes_on_exactly(nodes: Nodes, watch: TrainerWatch) -> None:
    nodes.only("near")
    job = nodes.running_on("near", "paused-twice")
    for attempts in (1, 2):
        nodes.service.step(job, job.data.progress.step + 20)
        assert len(job.data.attempts) == attempts
        assert nodes.service.http.post(f"/v1/jobs/{job.id}/pause").json()["status"] == "pausing"
        nodes.service.until(lambda: job.refresh().status == "paused", "it is paused")
        assert trainers_of(nodes, job) == [], "paused is said when none lives"
        assert nodes.node("near")["cpu_slots_used"] == 0
        assert nodes.service.http.post(f"/v1/jobs/{job.id}/resume").json()["status"] == "queued"
    nodes.service.step(job, job.data.progress.step + 20)
    assert [a.reason for a in job.data.attempts][:2] == ["stopped_by_request"] * 2
    assert job.data.restarts == 0
    stops(nodes, job)


def test_a_job_gives_way_to_a_higher_priority_and_goes_on_exactly(
    nodes: Nodes, watch: TrainerWatch
) -> None:
    """It saves, its trainer is gone before the other begins, and it pays with no restart."""
    nodes.only("near")
    whole_node = {"device": "cpu", "cpu_ranks": 4}
    jobs = nodes.service.client.jobs
    lower = jobs.create(nodes.spec("gives-way", steps=100_000) | {"resources": whole_node})
    nodes.service.step(lower, 25)
    higher = jobs.create(nodes.spec("goes-first", steps=200) | {"priority": 5})
    nodes.service.until(lambda: trainers_of(nodes, higher), "the higher one trains")
    assert trainers_of(nodes, lower) == []
    assert lower.refresh().status == "queued"
    assert (lower.data.attempts[0].outcome, lower.data.attempts[0].reason) == (
        "stopped",
        "preempted",
    )
    succeeds(nodes, higher)
    reached = lower.refresh().data.progress.step
    nodes.service.step(lower, reached + 20)
    assert lower.refresh().data.restarts == 0
    assert [attempt.number for attempt in lower.data.attempts] == [1, 2]
    (given,) = [e for e in nodes.service.events(lower.id) if "preempted_by" in (e["data"] or {})]
    assert given["data"]["preempted_by"] == higher.id
    (taken,) = [e for e in nodes.service.events(higher.id) if e["kind"] == "preempting"]
    assert taken["data"]["job_id"] == lower.id
    stops(nodes, lower)


def test_cancel_during_recovery(nodes: Nodes) -> None:
    """The job waits for its restart: nothing runs, so the cancel is the end at once."""
    nodes.only("near")
    job = nodes.running_on("near", "cancelled-in-recovery", restart_backoff_seconds=600)
    os.kill(nodes.service.trainer(job, "near"), signal.SIGKILL)
    nodes.service.until(lambda: job.refresh().status == "queued", "it is to start again")
    assert nodes.service.object(job.id)["next_attempt_at"] is not None
    assert job.cancel().status == "cancelled"
    assert [attempt.reason for attempt in job.data.attempts] == ["trainer_crashed"]
    assert trainers_of(nodes, job) == []
    exact(job)


def test_a_node_of_many_cancels_takes_the_next_job(nodes: Nodes, watch: TrainerWatch) -> None:
    """Cancelled at every moment, from the queue to the training: nothing of them stays there."""
    nodes.only("near")
    cancelled = []
    for number in range(4):
        queued, placed, trains = (nodes.submit(f"many-{number}", steps=100_000) for _ in range(3))
        queued.cancel()
        nodes.service.until(lambda job=placed: job.refresh().data.attempts, "it is placed")
        placed.cancel()
        nodes.service.step(trains, 1)
        trains.cancel()
        cancelled += [queued, placed, trains]
    for job in cancelled:
        nodes.service.end(job, "cancelled")
        assert trainers_of(nodes, job) == []
    assert nodes.node("near")["cpu_slots_used"] == 0
    worker = nodes.service.stack.process("worker-near").pid
    nodes.service.until(lambda: is_idle(worker), "the node's worker has no more to do")
    succeeds(nodes, nodes.submit("after-many", steps=20))


def test_cancel_without_a_controller(nodes: Nodes) -> None:
    """A cancel waits for nobody but the job's own supervisor; what it saved is kept."""
    nodes.only("near")
    job = nodes.running_on("near", "cancelled-alone", cancel_deadline_seconds=60)
    controller = nodes.service.stack.process("controller")
    os.kill(controller.pid, signal.SIGKILL)
    nodes.service.until(lambda: not controller.running, "the controller is dead")
    try:
        stops(nodes, job)
    finally:
        nodes.service.stack.restart("controller")
    assert trainers_of(nodes, job) == []
    last = job.metrics("train/loss")[-1].steps[-1]
    saved = {artifact.step for artifact in job.artifacts() if artifact.kind == "checkpoint"}
    assert last in saved, "a job that is being cancelled may still store its checkpoint"


def test_clients_that_hang_up_while_they_post(nodes: Nodes) -> None:
    """A job was taken, and then comes to its end, or it was not; asking again makes no second."""
    nodes.only("near", "far")
    place = urlsplit(nodes.service.stack.url)
    spec = nodes.spec("hung-up", steps=5)
    body = json.dumps(spec).encode()
    for number in range(12):
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Authorization: {nodes.service.http.headers['Authorization']}\r\n"
            f"Idempotency-Key: hung-up-{number}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((place.hostname or "", place.port or 0)) as connection:
            connection.sendall(head.encode() + body)
            # Gone while the job is being stored, a moment earlier or later each time.
            time.sleep(number * 0.001)
    made = set()
    for number in range(12):
        headers = {"Idempotency-Key": f"hung-up-{number}"}

        def ask(headers: dict[str, str] = headers) -> Any:
            answer = nodes.service.http.post("/v1/jobs", json=spec, headers=headers)
            # The request that nobody waits for any more may be in flight yet.
            return answer if answer.status_code != 409 else None

        answer = nodes.service.until(ask, "the first request is over")
        assert answer.status_code in (200, 201), answer.text
        made.add(answer.json()["id"])
    assert len(made) == 12
    assert {job.id for job in nodes.service.client.jobs.list(name="hung-up")} == made
    for job_id in made:
        succeeds(nodes, nodes.service.client.jobs.get(job_id))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_posted_while_redis_is_lost(nodes: Nodes) -> None:
    """It is away for a minute, comes back with nothing in it, and is away again; every job that was
    taken comes to its end, and none is charged for it."""
    nodes.only("near", "far")
    stack = nodes.service.stack
    jobs = []
    for seconds, pause in ((60, 5.0), (5, 1.0)):
        process = stack.process("valkey")
        os.kill(process.pid, signal.SIGKILL)
        nodes.service.until(lambda process=process: not process.running, "Valkey is dead")
        gone = time.monotonic()
        while time.monotonic() < gone + seconds:
            jobs.append(nodes.submit("without-redis", steps=20))
            time.sleep(pause)  # a user's; every one of them is answered
        for name in ("appendonlydir", "dump.rdb"):
            _remove(stack.data_dir / "valkey" / name)
        stack.restart("valkey")
    for job in jobs:
        succeeds(nodes, job)
        assert job.data.restarts == 0


def _remove(path: Path) -> None:
    if path.is_dir():
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
