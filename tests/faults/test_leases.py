"""Clocks that jump, silences and outages longer than a lease. Leases are of 30 s, the shortest
there are; they stand for the hours that a job may ask for.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from octrain.client import Job
from octrain.local.processes import descendants, is_alive
from tests.chaos.watch import TrainerWatch
from tests.faults.faulty_nodes import LEASE, Nodes, exact, series, stops, trainers_of, wake
from tests.running_service import command_line

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


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


def are_over_before_their_attempts(jobs: Sequence[Job], trainers: dict[str, list[int]]) -> bool:
    """Whether no trainer of the jobs lives; no first attempt may end before its trainer."""
    over = []
    for job in jobs:
        has_ended = job.refresh().data.attempts[0].status == "ended"
        lives = any(is_alive(pid) for pid in trainers[job.id])
        assert not (has_ended and lives), "the device is given to another while the trainer lives"
        over.append(not lives)
    return all(over)


def starting_on(nodes: Nodes, name: str, asleep: list[int]) -> Job:
    """A job that was claimed on this node, the only one that takes jobs, and whose trainer has not
    begun: it is frozen from before its job was there."""
    service = nodes.service
    worker = service.stack.process(f"worker-{name}").pid

    def spares() -> list[int]:
        return [pid for pid in descendants(worker) if command_line(pid).endswith(" spare")]

    (spare,) = service.until(spares, "a spare trainer waits")
    os.kill(spare, signal.SIGSTOP)
    asleep.append(spare)
    job = nodes.submit("still-starting", steps=100_000)
    service.until(
        lambda: "claimed" in {event["kind"] for event in service.events(job.id)}, "it is claimed"
    )
    assert job.refresh().data.attempts[-1].node == name
    assert job.status == "starting"
    return job


def test_beyond_the_lease(nodes: Nodes, asleep: list[int], watch: TrainerWatch) -> None:
    """Three nodes of which a supervisor is not heard for longer than its lease, at one time:

    ``near`` is frozen as a whole and wakes up when its jobs run elsewhere, one of which had been
    claimed there and was still starting; on ``far`` the supervisor alone is frozen; ``third`` is
    cut off from the API. On the first two a further job is cancelled, or paused, in that time.
    """
    service = nodes.service
    nodes.add("third")
    nodes.only("near")
    frozen, cancelled = (nodes.running_on("near", name) for name in ("frozen-node", "cancelled"))
    starting = starting_on(nodes, "near", asleep)
    nodes.only("far")
    shared, paused = (nodes.running_on("far", name) for name in ("frozen-alone", "paused"))
    nodes.only("third")
    cut = nodes.running_on("third", "cut-off")
    nodes.only("near", "far", "third")

    asleep.append(service.stack.process("worker-near").pid)
    for job in (frozen, cancelled, starting):
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

    silent_for(nodes, frozen, cancelled, starting, shared, paused, cut)
    assert starting.refresh().status == "starting"
    assert cancelled.cancel().status == "cancelling"
    assert service.http.post(f"/v1/jobs/{paused.id}/pause").json()["status"] == "pausing"
    # The node ends what a frozen supervisor left; one that is cut off fences itself.
    service.until(
        lambda: are_over_before_their_attempts((shared, paused, cut), first),
        "no trainer lives on a node that is not frozen",
    )
    for job in (frozen, starting, shared, cut):
        service.until(lambda job=job: len(job.refresh().data.attempts) == 2, "a new attempt")
        assert job.data.attempts[0].reason == "worker_lost"
        assert job.data.restarts == 1
    service.end(cancelled, "cancelled")
    assert "presumed" in (cancelled.data.detail or "")
    heard = max(
        datetime.fromisoformat(event["data"]["last_heard_at"])
        for event in service.events(cancelled.id)
        if event["kind"] == "node_unreachable"
    )
    ended = datetime.fromisoformat(service.object(cancelled.id)["ended_at"])
    assert ended - heard >= timedelta(seconds=LEASE), "not before it is surely over"
    service.until(lambda: paused.refresh().status == "paused", "it is paused")
    nodes.only("far", "third")
    for job in (frozen, starting, shared):
        service.step(job, job.data.progress.step + 20)
    before = {job.id: _written_by_first(nodes, job) for job in (frozen, cancelled, starting, cut)}
    version = cancelled.refresh().data.version

    nodes.proxies["third"].become("pass")
    for pid in reversed(asleep):
        wake(pid)
    for job in (frozen, cancelled, starting, cut):
        node = job.data.attempts[0].node
        folder = service.stack.worker_data_dir(node) / "attempts" / job.data.attempts[0].id
        service.until((folder / "finished.json").exists, f"{node} lets the attempt go")
        assert "disowned" in (folder / "finished.json").read_text()
        assert not any(is_alive(pid) for pid in first.get(job.id, []))
    # A node that is frozen as a whole keeps its trainers, frozen, while their jobs run elsewhere;
    # one that had been told to begin may do so before its supervisor has ended it.
    looks = watch.looks
    service.until(lambda: watch.looks > looks + 2, "a look at what is left")
    on_frozen = {frozen.id, starting.id}
    watch.doubles = {key: text for key, text in watch.doubles.items() if key[0] not in on_frozen}
    for job in (frozen, cancelled, starting, cut):
        *written, artifacts = _written_by_first(nodes, job)
        *had, recorded = before[job.id]
        assert written == had, "a stale supervisor has written"
        # The attempt that goes on prunes what the first one left; it may be over with it by now.
        assert set(artifacts) <= set(recorded), "a stale supervisor has recorded a checkpoint"
    assert cancelled.refresh().data.version == version
    for job in (frozen, starting, shared, cut):
        service.step(job, job.data.progress.step + 20)
        assert [a.status for a in job.refresh().data.attempts] == ["ended", "running"]
        stops(nodes, job)
    assert paused.cancel().status == "cancelled"
    for job in (cancelled, paused):
        exact(job)


def _written_by_first(nodes: Nodes, job: Job) -> tuple[Any, ...]:
    """All that the first attempt has in the database."""
    attempt = job.refresh().data.attempts[0]
    artifacts = [artifact.id for artifact in job.artifacts() if artifact.attempt == 1]
    return attempt.model_dump(), series(nodes, job, attempt=1), artifacts


def test_a_lease_that_a_stop_shortens_unheard(nodes: Nodes, watch: TrainerWatch) -> None:
    """The answers that say cancel, and grant less, are lost, and then the node is cut off: its
    trainer runs by the lease of before, and the place is nobody else's until that is over."""
    service = nodes.service
    nodes.only("near")
    job = nodes.running_on("near", "unheard", lease_ttl_seconds=45)
    attempt = job.data.attempts[-1]
    (trainer,) = trainers_of(nodes, job)

    def lease() -> tuple[int, timedelta]:
        with psycopg.connect(service.stack.database_url) as connection:
            found = connection.execute(
                "SELECT lease_number, lease_granted_until - now() FROM attempts WHERE id = %s",
                [attempt.id],
            ).fetchone()
        assert found is not None
        return found

    nodes.proxies["near"].become("unanswered")
    assert job.cancel().status == "cancelling"
    number, _ = lease()
    service.until(lambda: lease()[0] > number, "a heartbeat that is not answered")
    nodes.proxies["near"].become("blackhole")
    assert lease()[1] < timedelta(seconds=11), "the deadline of the cancel, and the forced lease"
    assert is_alive(trainer)

    def is_over() -> bool:
        # In this order: a trainer that is gone now was gone when the attempt is seen to have ended.
        lives = is_alive(trainer)
        used = nodes.node("near")["cpu_slots_used"]
        assert used == 1 or not lives, "its place is free, and it lives"
        return not lives

    service.until(is_over, "it has saved and stopped, by the lease that it knows of")
    assert job.refresh().status == "cancelling", "which is not over yet"
    service.end(job, "cancelled")
    assert "presumed" in (job.data.detail or "")
    nodes.proxies["near"].become("pass")
    exact(job)


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
        service.until(lambda process=process: not process.running, f"{name} is gone")
    gone = time.monotonic()
    service.until(lambda: not is_alive(trainer[hasty.id]), "the short lease ends")
    saved = service.local_step(hasty, node[hasty.id])
    service.until(lambda: time.monotonic() > gone + LEASE + 2, "the outage outlasts the lease")
    reached = service.local_step(patient, node[patient.id])
    for name in ("postgres", "api"):
        service.stack.restart(name)
    service.until(service.stack.is_ready, "the API answers again")

    service.until(lambda: patient.refresh().data.progress.step > reached, "it is told")
    assert is_alive(trainer[patient.id])
    assert [attempt.status for attempt in patient.data.attempts] == ["running"]
    service.until(lambda: len(hasty.refresh().data.attempts) == 2, "it starts again")
    assert hasty.data.attempts[0].reason == "worker_lost"
    assert hasty.data.restarts == 0, "the outage was the service's own"
    service.until(lambda: hasty.refresh().data.progress.step > saved, "it goes on")
    (again,) = series(nodes, hasty, attempt=2)
    assert again["points"][0][0] == saved + 1, "it saved before it stopped"
    for job in (patient, hasty):
        stops(nodes, job)
