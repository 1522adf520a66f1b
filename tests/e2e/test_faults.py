"""Faults at chosen instants, each with the one end it may have. Leases are of 30 s, the shortest
there are; they stand for the hours that a job may ask for.

The trainer is the scripted one of the chaos runs: each of its losses depends on all steps before
it, so a series that equals an undisturbed one has lost, repeated and mixed up nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from octrain.client import Job
from octrain.local.processes import descendants, is_alive
from octrain_api.controller.relay import CelerySender
from octrain_api.nodes.service import queue_of
from octrain_api.settings import BrokerSettings
from tests.chaos import trainer as scripted
from tests.chaos.proxy import CuttableProxy
from tests.chaos.watch import TrainerWatch, trainers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LEASE = 30
ENVIRONMENT = {
    "OCTRAIN_TRAINER_COMMAND": f"{sys.executable} {scripted.__file__}",
    "OCTRAIN_WORKER_CPU_SLOTS": "3",
    "OCTRAIN_WORKER_SPARE_DELAY_SECONDS": "0.5",
    "OCTRAIN_CONTROLLER_TICK": "0.5",
    "OCTRAIN_CONTROLLER_HEARTBEAT_INTERVAL": "1",
    "OCTRAIN_CONTROLLER_HEARTBEAT_TTL": "8",
    "OCTRAIN_CONTROLLER_DOWNTIME_TOLERANCE": "5",
    "OCTRAIN_CONTROLLER_LEASE_MARGIN": "6",
    "OCTRAIN_CONTROLLER_FORCED_LEASE": "5",
    "OCTRAIN_CONTROLLER_RESEND_AFTER": "10",
    "OCTRAIN_SCHEDULER_FAULT_LIMIT": "0",
}


@dataclass
class Nodes:
    """A service, and the network between it and each of its nodes."""

    service: Any
    proxies: dict[str, CuttableProxy]

    def add(self, name: str) -> None:
        """Start a node and wait until it is live."""
        self.proxies[name] = CuttableProxy([self.service.stack.port])
        self.service.stack.start_worker(name, api_url=self.proxies[name].url)
        self.service.until(lambda: self.node(name).get("live"), f"the node {name} is live", 60)

    def node(self, name: str) -> dict[str, Any]:
        nodes = self.service.http.get("/v1/nodes").json()["items"]
        return next((node for node in nodes if node["name"] == name), {})

    def only(self, *names: str) -> None:
        """Let jobs be placed on these nodes alone."""
        for node in self.service.http.get("/v1/nodes").json()["items"]:
            wish = "undrain" if node["name"] in names else "drain"
            answer = self.service.http.post(f"/v1/nodes/{node['id']}/{wish}")
            assert answer.status_code == 200, answer.text

    def submit(self, name: str, *, steps: int = 200, **limits: Any) -> Job:
        made: Job = self.service.client.jobs.create(self.spec(name, steps=steps, **limits))
        return made

    def spec(self, name: str, *, steps: int, **limits: Any) -> dict[str, Any]:
        made: dict[str, Any] = self.service.spec(
            name,
            labels={"trainer": "scripted", "seed": str(len(name)), "step_seconds": "0.02"},
            training={"steps": steps},
            checkpoint={"every_steps": 10, "keep_last": 2},
            limits={
                "lease_ttl_seconds": LEASE,
                "cancel_deadline_seconds": 5,
                "restart_backoff_seconds": 0,
                **limits,
            },
        )
        return made

    def running_on(self, name: str, job_name: str, **limits: Any) -> Job:
        """A job of many steps that has stored a checkpoint, on this node."""
        job = self.submit(job_name, **{"steps": 100_000, **limits})
        self.service.step(job, 25)
        self.service.until(lambda: _kinds_of(job) & {"checkpoint"}, "a checkpoint is stored")
        assert job.refresh().data.attempts[-1].node == name
        return job


@pytest.fixture(scope="module")
def nodes(start_service: Any) -> Iterator[Nodes]:
    made = Nodes(start_service("faults", ENVIRONMENT, workers=[]), {})
    made.add("near")
    made.add("far")
    yield made
    made.service.stack.stop()
    for proxy in made.proxies.values():
        proxy.close()


@pytest.fixture
def watch(nodes: Nodes) -> Iterator[TrainerWatch]:
    watch = TrainerWatch(nodes.service.stack.data_dir)
    watch.start()
    yield watch
    watch.stop()
    assert watch.doubles == {}, "two trainers of one job lived at one time"


@pytest.fixture
def asleep(nodes: Nodes) -> Iterator[list[int]]:
    """Processes that a test has frozen; whatever becomes of it, they are woken."""
    frozen: list[int] = []
    yield frozen
    for pid in frozen:
        _wake(pid)
    for proxy in nodes.proxies.values():
        proxy.become("pass")


def _kinds_of(job: Job) -> set[str]:
    return {artifact.kind for artifact in job.artifacts()}


def exact(job: Job) -> None:
    """The joined series of a job is that of an undisturbed one."""
    points = [point for series in job.metrics("train/loss") for point in series.points]
    steps = [step for step, _ in points]
    assert steps == list(range(1, len(steps) + 1)), "twice, or left out"
    seed = int(job.data.spec["labels"]["seed"])
    assert [value for _, value in points] == scripted.losses(seed, len(steps))


def succeeds(nodes: Nodes, job: Job) -> None:
    nodes.service.end(job)
    exact(job)
    assert (
        sum(len(s.steps) for s in job.metrics("train/loss")) == job.data.spec["training"]["steps"]
    )


def stops(nodes: Nodes, job: Job) -> None:
    job.cancel()
    nodes.service.end(job, "cancelled")
    exact(job)


def trainers_of(nodes: Nodes, job: Job) -> list[int]:
    return [one.pid for one in trainers(nodes.service.stack.data_dir) if one.job == job.id]


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
            lambda: nodes.service.local_step(job, "near") > reached + 100, "it trains on"
        )
        # What the API knows stands still meanwhile: the cut is one.
        assert job.refresh().data.progress.step <= reached + 50
    finally:
        nodes.proxies["near"].become("pass")
    nodes.service.until(lambda: job.refresh().data.progress.step > reached + 100, "it is told")
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
    """Its node is heard until then, so the job is placed there; and then elsewhere."""
    worker = nodes.service.stack.process("worker-near").pid
    nodes.only("near")
    os.kill(worker, signal.SIGSTOP)
    try:
        job = nodes.submit("not-taken", steps=50)
        nodes.service.until(lambda: job.refresh().status == "starting", "it is placed")
        assert job.data.attempts[-1].node == "near"
        nodes.only("near", "far")
        succeeds(nodes, job)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert [attempt.reason for attempt in job.data.attempts] == ["undelivered", "completed"]
    assert job.data.attempts[-1].node == "far"
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


def test_cancel_without_a_controller(nodes: Nodes) -> None:
    """A cancel waits for nobody but the job's own supervisor; what it saved is kept."""
    nodes.only("near")
    job = nodes.running_on("near", "cancelled-alone")
    controller = nodes.service.stack.process("controller")
    os.kill(controller.pid, signal.SIGKILL)
    nodes.service.until(lambda: not controller.running, "the controller is dead", 10)
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
def test_jobs_posted_while_redis_is_lost(nodes: Nodes) -> None:
    """It is away, comes back with nothing in it, and is away again; every job that was taken
    comes to its end, and none is charged for it. A few seconds stand for the minute."""
    nodes.only("near", "far")
    stack = nodes.service.stack
    jobs = []
    for _ in range(2):
        process = stack.process("valkey")
        os.kill(process.pid, signal.SIGKILL)
        nodes.service.until(lambda process=process: not process.running, "Valkey is dead", 10)
        gone = time.monotonic()
        while time.monotonic() < gone + 5:
            jobs.append(nodes.submit("without-redis", steps=20))
            time.sleep(1.0)  # a user's pause; every one of them is answered
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


@pytest.mark.slow
def test_a_node_whose_clock_jumps_by_an_hour(
    nodes: Nodes, watch: TrainerWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forth and back while a job runs: leases are counted by the clock that runs since boot, and
    the job's times are the database's."""
    flag = tmp_path / "jumped"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "_time = time.time\n"
        f"time.time = lambda: _time() + (3600 * os.path.exists({str(flag)!r}))\n"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    began = datetime.now().astimezone()
    flag.touch()
    nodes.add("wrong-clock")
    nodes.only("wrong-clock")
    job = nodes.running_on("wrong-clock", "an-hour-off")
    for jump in (flag.unlink, flag.touch, flag.unlink):
        jump()
        reached = job.refresh().data.progress.step
        nodes.service.until(lambda r=reached: job.refresh().data.progress.step > r + 50, "it runs")
    assert job.status == "running"
    stops(nodes, job)
    ended = datetime.now().astimezone()
    assert [attempt.reason for attempt in job.data.attempts] == ["cancelled_by_user"]
    found = nodes.service.object(job.id)
    times = [found["created_at"], found["started_at"], found["ended_at"]]
    times += [event["time"] for event in nodes.service.events(job.id)]
    for text in times:
        assert (
            began - timedelta(seconds=5)
            <= datetime.fromisoformat(text)
            <= ended + timedelta(seconds=5)
        )
    nodes.service.stack.process("worker-wrong-clock").stop(10.0)


def silent_for(nodes: Nodes, *jobs: Job) -> None:
    for job in jobs:
        nodes.service.until(
            lambda job=job: (
                "node_unreachable" in {event["kind"] for event in nodes.service.events(job.id)}
            ),
            f"{job.id} is missed",
        )


@pytest.mark.slow
def test_beyond_the_lease(nodes: Nodes, asleep: list[int], watch: TrainerWatch) -> None:
    """Three nodes of which a supervisor is not heard for longer than its lease, at one time:

    ``near`` is frozen as a whole and wakes up when its job runs elsewhere; on ``far`` the
    supervisor alone is frozen; ``third`` is cut off from the API. On the first two a second job is
    cancelled, or paused, in that time.
    """
    service = nodes.service
    nodes.add("third")
    nodes.only("near")
    frozen, cancelled = (nodes.running_on("near", name) for name in ("frozen-node", "cancelled"))
    nodes.only("far")
    shared, paused = (nodes.running_on("far", name) for name in ("frozen-alone", "paused"))
    nodes.only("third")
    cut = nodes.running_on("third", "cut-off")
    nodes.only("near", "far", "third")

    asleep.append(service.stack.process("worker-near").pid)
    for job in (frozen, cancelled):
        supervisor = service.supervisor(job, "near")
        asleep += [supervisor, *descendants(supervisor)]
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    alone = [service.supervisor(job, "far") for job in (shared, paused)]
    for pid in alone:
        os.kill(pid, signal.SIGSTOP)
    asleep[:0] = alone
    nodes.proxies["third"].become("blackhole")
    first = {job.id: trainers_of(nodes, job) for job in (frozen, cancelled, shared, paused, cut)}
    assert all(len(pids) == 1 for pids in first.values())

    silent_for(nodes, frozen, cancelled, shared, paused, cut)
    assert cancelled.cancel().status == "cancelling"
    assert service.http.post(f"/v1/jobs/{paused.id}/pause").json()["status"] == "pausing"
    service.until(
        lambda: all(not is_alive(pid) for job in (shared, paused) for pid in first[job.id]),
        "the node ends the trainers of frozen supervisors",
        90,
    )
    # Before the service gives the device to another: their attempts are still open.
    assert [a.status for a in shared.refresh().data.attempts] == ["running"]
    service.until(lambda: not is_alive(first[cut.id][0]), "its node fences itself", 60)
    assert [a.status for a in cut.refresh().data.attempts] == ["running"]
    assert cancelled.refresh().status == "cancelling", "not before it is surely over"

    for job in (frozen, shared, cut):
        service.until(lambda job=job: len(job.refresh().data.attempts) == 2, "a new attempt", 90)
        assert job.data.attempts[0].reason == "worker_lost"
        assert job.data.restarts == 1
    service.end(cancelled, "cancelled", 30)
    assert "presumed" in (cancelled.data.detail or "")
    service.until(lambda: paused.refresh().status == "paused", "it is paused", 30)
    nodes.only("far", "third")
    for job in (frozen, shared):
        service.step(job, job.data.progress.step + 20)
    before = {job.id: _written_by_first(nodes, job) for job in (frozen, cancelled, cut)}
    version = cancelled.refresh().data.version

    nodes.proxies["third"].become("pass")
    for pid in reversed(asleep):
        _wake(pid)
    for job, node in ((frozen, "near"), (cancelled, "near"), (cut, "third")):
        folder = service.stack.worker_data_dir(node) / "attempts" / job.data.attempts[0].id
        service.until((folder / "finished.json").exists, f"{node} lets the attempt go", 60)
        assert "disowned" in (folder / "finished.json").read_text()
        assert not any(is_alive(pid) for pid in first[job.id])
    # A node that is frozen as a whole keeps its trainer, frozen, while the job runs elsewhere.
    looks = watch.looks
    service.until(lambda: watch.looks > looks + 2, "a look at what is left")
    watch.doubles = {key: text for key, text in watch.doubles.items() if key[0] != frozen.id}
    for job in (frozen, cancelled, cut):
        *written, artifacts = _written_by_first(nodes, job)
        *had, kept = before[job.id]
        assert written == had, "a stale supervisor has written"
        # The attempt that goes on prunes what the first one left; it may be over with it by now.
        assert set(artifacts) <= set(kept), "a stale supervisor has recorded a checkpoint"
    assert cancelled.refresh().data.version == version
    for job in (frozen, shared, cut):
        service.step(job, job.data.progress.step + 20)
        assert [a.status for a in job.refresh().data.attempts] == ["ended", "running"]
        stops(nodes, job)
    assert paused.cancel().status == "cancelled"
    for job in (cancelled, paused):
        exact(job)


def _wake(pid: int) -> None:
    if is_alive(pid):
        os.kill(pid, signal.SIGCONT)


def _written_by_first(nodes: Nodes, job: Job) -> tuple[Any, ...]:
    """All that the first attempt has in the database."""
    attempt = job.refresh().data.attempts[0]
    artifacts = [artifact.id for artifact in job.artifacts() if artifact.attempt == 1]
    return attempt.model_dump(), _series(nodes, job, attempt=1), artifacts


def _series(nodes: Nodes, job: Job, attempt: int) -> list[dict[str, Any]]:
    answer = nodes.service.http.get(
        f"/v1/jobs/{job.id}/metrics", params={"keys": "train/loss", "attempt": attempt}
    )
    return list(answer.json()["series"])


@pytest.mark.slow
def test_an_outage_of_api_and_database(nodes: Nodes, watch: TrainerWatch) -> None:
    """It interrupts no job whose lease allows it (two thirds of a short lease, all but two minutes
    of a long one). A job of a shorter lease starts again where it was, and is not charged for it.
    """
    service = nodes.service
    nodes.only("near", "far")
    patient = nodes.submit("rides-it-out", steps=100_000, lease_ttl_seconds=600)
    hasty = nodes.submit("short-of-patience", steps=100_000)
    for job in (patient, hasty):
        service.step(job, 25)
    node = {job.id: job.refresh().data.attempts[-1].node for job in (patient, hasty)}
    trainer = {job.id: service.trainer(job, node[job.id]) for job in (patient, hasty)}

    for name, number in (("api", signal.SIGKILL), ("postgres", signal.SIGQUIT)):
        process = service.stack.process(name)
        os.kill(process.pid, number)
        service.until(lambda process=process: not process.running, f"{name} is gone", 30)
    gone = time.monotonic()
    service.until(lambda: not is_alive(trainer[hasty.id]), "the short lease ends", 60)
    saved = service.local_step(hasty, node[hasty.id])
    service.until(lambda: time.monotonic() > gone + LEASE + 2, "the outage outlasts the lease")
    reached = service.local_step(patient, node[patient.id])
    for name in ("postgres", "api"):
        service.stack.restart(name)
    service.until(service.stack.is_ready, "the API answers again", 60)

    service.until(lambda: patient.refresh().data.progress.step > reached, "it is told")
    assert is_alive(trainer[patient.id])
    assert [attempt.status for attempt in patient.data.attempts] == ["running"]
    service.until(lambda: len(hasty.refresh().data.attempts) == 2, "it starts again", 60)
    assert hasty.data.attempts[0].reason == "worker_lost"
    assert hasty.data.restarts == 0, "the outage was the service's own"
    service.until(lambda: hasty.refresh().data.progress.step > saved, "it goes on")
    (again,) = _series(nodes, hasty, attempt=2)
    assert again["points"][0][0] == saved + 1, "it saved before it stopped"
    for job in (patient, hasty):
        stops(nodes, job)
