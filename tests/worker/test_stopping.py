"""Pause, cancel, shutdown and the end of a lease: nothing of the trainer is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.data import prefetch
from octrain_worker.settings import SupervisorSettings
from octrain_worker.supervisor.process_tree import read_process


def alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.dead


def numbered(count: int) -> list[int]:
    return list(range(1, count + 1))


def test_pause_saves_a_checkpoint(workplace: Any, until: Callable[..., Any]) -> None:
    attempt = workplace.api.add("att_a", {"steps": 5000, "step_seconds": 0.02})
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps, "first step")
    attempt.wanted = "pause"
    assert child.wait(timeout=30) == 0, workplace.log()
    assert attempt.finished["outcome"] == "stopped"
    assert attempt.finished["reason"] == "stopped_by_request"
    assert attempt.finished["resumable"] is True
    assert ("checkpoint", f"step-{attempt.finished['step']:08d}") in attempt.artifacts


def test_a_stop_has_the_time_that_the_service_gives_it(
    workplace: Any, until: Callable[..., Any]
) -> None:
    """The spec's own deadline is an hour; of the service's a second is left."""
    script = {"steps": 5000, "step_seconds": 0.02, "ignore_sigterm": True}
    attempt = workplace.api.add("att_a", script, limits={"cancel_deadline_seconds": 3600})
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps, "first step")
    with workplace.api.lock:
        attempt.wanted, attempt.wanted_reason = "pause", "preempted"
        attempt.stop_by = time.monotonic() + 1.0
    assert child.wait(timeout=30) == 0, workplace.log()
    assert attempt.finished["outcome"] == "stopped"
    assert "(preempted)" in attempt.finished["detail"]
    assert "was killed" in attempt.finished["detail"]


def test_a_cancel_is_heard_with_the_telemetry(workplace: Any, until: Callable[..., Any]) -> None:
    """No heartbeat is due for an hour."""
    workplace.api.heartbeat_interval = 3600.0
    attempt = workplace.api.add("att_a", {"steps": 5000, "step_seconds": 0.02})
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps, "first step")
    attempt.wanted = "cancel"
    assert child.wait(timeout=30) == 0, workplace.log()
    assert attempt.finished["reason"] == "cancelled_by_user"
    assert attempt.heartbeats == 0


def test_cancel_before_the_trainer_began(workplace: Any) -> None:
    attempt = workplace.api.add("att_a", {"steps": 5000, "step_seconds": 0.02})
    attempt.wanted = "cancel"
    assert workplace.supervise("att_a").wait(timeout=30) == 0, workplace.log()
    assert attempt.finished["reason"] == "cancelled_by_user"
    assert attempt.steps == []


def test_cancel_leaves_no_descendant(
    workplace: Any, tmp_path: Path, until: Callable[..., Any]
) -> None:
    """A trainer deaf to SIGTERM, its grandchildren deaf too, in sessions of their own."""
    family = tmp_path / "family"
    attempt = workplace.api.add(
        "att_a",
        {
            "steps": 5000,
            "step_seconds": 0.02,
            "ignore_sigterm": True,
            "family": str(family),
        },
    )
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps, "first step")
    pids = [int(pid) for pid in family.read_text().split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    everyone = workplace.trainer_processes("att_a")
    assert set(pids) < set(everyone)
    finishing: list[list[int]] = []
    finish = workplace.api._finish

    def watched(attempt: Any, body: dict[str, Any]) -> tuple[int, Any]:
        finishing.append([pid for pid in everyone if alive(pid)])
        return finish(attempt, body)

    workplace.api._finish = watched
    attempt.wanted = "cancel"
    assert child.wait(timeout=30) == 0, workplace.log()
    assert attempt.finished["reason"] == "cancelled_by_user"
    assert "killed" in attempt.finished["detail"]
    assert finishing == [[]], "something lived when the attempt was reported as ended"


NVML = """
import pathlib, types

NVMLError = type("NVMLError", (Exception,), {})
folder = pathlib.Path(__file__).parent
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetComputeRunningProcesses = lambda device: []


def nvmlDeviceGetMemoryInfo(device):
    with (folder / "asked").open("a") as asked:
        asked.write(".")
    return types.SimpleNamespace(used=int((folder / "used").read_text()))
"""


def test_an_attempt_has_ended_when_its_gpus_are_free_again(
    workplace: Any, tmp_path: Path, until: Callable[..., Any]
) -> None:
    """The driver gives memory back a while after the last process; a stand-in plays the driver."""
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "pynvml.py").write_text(NVML)

    def holds(used: int) -> None:
        (driver / "next").write_text(str(used))
        (driver / "next").replace(driver / "used")

    holds(1 << 30)
    paths = [str(driver), workplace.environment["PYTHONPATH"]]
    workplace.environment["PYTHONPATH"] = os.pathsep.join(paths)
    script = {"steps": 5000, "step_seconds": 0.02}
    attempt = workplace.api.add("att_a", script, gpu_indices=[0])
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps, "first step")
    everyone = workplace.trainer_processes("att_a")
    assert everyone
    holds(41 << 30)
    attempt.wanted = "cancel"
    until(lambda: not [pid for pid in everyone if alive(pid)], "the trainer's end")
    asked = (driver / "asked").stat().st_size
    until(lambda: (driver / "asked").stat().st_size > asked + 2, "looks at what the GPU holds")
    assert attempt.finished is None
    holds(1 << 30)
    assert child.wait(timeout=60) == 0, workplace.log()
    assert attempt.finished["reason"] == "cancelled_by_user"
    assert "gpu_memory_held" not in attempt.events


def test_processes_left_by_a_good_trainer_are_ended(workplace: Any, tmp_path: Path) -> None:
    family = tmp_path / "family"
    attempt = workplace.api.add("att_a", {"steps": 2, "family": str(family)})
    assert workplace.supervise("att_a").wait(timeout=30) == 0, workplace.log()
    assert attempt.finished["outcome"] == "succeeded"
    assert not [pid for pid in map(int, family.read_text().split()) if alive(pid)]


def test_a_heartbeat_says_which_lease_is_held(workplace: Any, until: Callable[..., Any]) -> None:
    """That of the last answer which came: the API may count on no other."""
    attempt = workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02})
    answered = workplace.api._heartbeat
    lost: list[int] = []

    def losing(attempt: Any, body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = answered(attempt, body)
        if attempt.heartbeats not in (2, 3):
            return status, answer
        lost.append(answer["lease_number"])
        return 502, {"detail": "the answer is lost"}

    workplace.api._heartbeat = losing
    child = workplace.supervise("att_a")
    until(lambda: attempt.heartbeats >= 6, "six heartbeats")
    attempt.wanted = "cancel"
    assert child.wait(timeout=30) == 0, workplace.log()
    assert lost == [3, 4]
    assert attempt.held[:6] == [1, 2, 2, 2, 5, 6]


@pytest.mark.parametrize("allowed", [True, False])
def test_an_hour_without_the_api(
    workplace: Any, tmp_path: Path, until: Callable[..., Any], allowed: bool
) -> None:
    """Where the lease allows it, training goes on in the same attempt as if nothing had been; the
    hour is one of the machine's clock that runs since boot."""
    passed = tmp_path / "passed"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "_clock = time.clock_gettime\n"
        "time.clock_gettime = lambda which: _clock(which) + (\n"
        f"    3600 if which == time.CLOCK_BOOTTIME and os.path.exists({str(passed)!r}) else 0)\n"
    )
    paths = [str(tmp_path), workplace.environment["PYTHONPATH"]]
    workplace.environment["PYTHONPATH"] = os.pathsep.join(paths)
    attempt = workplace.api.add("att_a", {"steps": 99999, "step_seconds": 0.02})
    attempt.lease_seconds = 7200.0 if allowed else 3000.0
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps and attempt.heartbeats > 1, "it trains, and is heard")
    workplace.api.away = True
    everyone = workplace.trainer_processes("att_a")
    assert everyone
    asked = len(workplace.api.requests)
    passed.touch()
    if not allowed:
        until(lambda: not [pid for pid in everyone if alive(pid)], "the trainer's end", 20)
        workplace.api.away = False
        assert child.wait(timeout=30) == 0, workplace.log()
        assert (attempt.finished["reason"], attempt.finished["resumable"]) == ("worker_lost", True)
        return
    until(lambda: len(workplace.api.requests) > asked + 3, "it asks, and is not answered")
    assert all(alive(pid) for pid in everyone)
    before = attempt.steps[-1]
    workplace.api.away = False
    until(lambda: attempt.steps[-1] > before + 10, "it is told")
    assert workplace.trainer_processes("att_a") == everyone
    attempt.wanted = "cancel"
    assert child.wait(timeout=30) == 0, workplace.log()
    assert attempt.steps == numbered(attempt.finished["step"])


def test_lease_that_runs_out_stops_the_trainer_before_its_end(
    workplace: Any, until: Callable[..., Any]
) -> None:
    attempt = workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02})
    attempt.lease_seconds = 3.0
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps, "first step")
    heard = attempt.heartbeats
    until(lambda: attempt.heartbeats > heard, "a heartbeat")
    workplace.api.away = True
    away_at = time.monotonic()
    everyone = workplace.trainer_processes("att_a")
    assert everyone
    until(lambda: not [pid for pid in everyone if alive(pid)], "the trainer's end", 10)
    # The last heartbeat was answered before the API went away.
    assert time.monotonic() - away_at < 3.0
    assert child.poll() is None
    workplace.api.away = False
    assert child.wait(timeout=30) == 0, workplace.log()
    assert attempt.finished["reason"] == "worker_lost"
    assert attempt.finished["resumable"] is True
    assert ("checkpoint", f"step-{attempt.finished['step']:08d}") in attempt.artifacts
    assert attempt.steps == numbered(attempt.finished["step"])


def test_disowned_supervisor_writes_nothing_more(workplace: Any, until: Callable[..., Any]) -> None:
    attempt = workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02})
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps, "first step")
    everyone = workplace.trainer_processes("att_a")
    with workplace.api.lock:
        attempt.token = 8
        count = len(attempt.records)
    assert child.wait(timeout=30) == 3
    assert len(attempt.records) == count
    assert attempt.finished is None
    assert not [pid for pid in everyone if alive(pid)]


def test_a_read_that_does_not_return_leaves_a_trainer_time_to_end_in_order() -> None:
    grace = SupervisorSettings.model_fields["shutdown_grace_seconds"].default
    assert grace >= 2 * prefetch._PATIENCE


def test_first_sigterm_saves_second_leaves_at_once(
    workplace: Any, until: Callable[..., Any]
) -> None:
    polite = workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02})
    deaf = workplace.api.add("att_b", {"steps": 9999, "step_seconds": 0.02, "ignore_sigterm": True})
    first, second = workplace.supervise("att_a"), workplace.supervise("att_b")
    until(lambda: polite.steps and deaf.steps, "first steps")
    first.terminate()
    second.terminate()
    assert first.wait(timeout=30) == 0, workplace.log()
    assert polite.finished["outcome"] == "stopped"
    assert polite.finished["reason"] == "stopped_by_request"
    assert "node shuts down" in polite.finished["detail"]
    everyone = workplace.trainer_processes("att_b")
    assert everyone
    second.terminate()
    second.wait(timeout=5)
    assert not [pid for pid in everyone if alive(pid)]
