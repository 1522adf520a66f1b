"""The launcher's side: one result of all ranks, and nobody left alive."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8core.telemetry import read_records
from fp8core.training.ranks.launcher import Failure, judge
from fp8core.training.ranks.place import RankEnd, RankPlace, is_gone, parent_of

Job = Callable[..., Path]


def end(
    rank: int,
    outcome: str,
    reason: str,
    *,
    at: float,
    at_fault: int | None = None,
    secondary: bool = False,
) -> RankEnd:
    result = {"outcome": outcome, "reason": reason, "detail": "what it said", "step": 7}
    return RankEnd(rank, {**result, "rank": at_fault}, at, secondary)


def failed(rank: int, reason: str, **more: Any) -> RankEnd:
    return end(rank, "failed", reason, **more)


def test_the_success_of_rank_0_is_that_of_all() -> None:
    done = end(0, "succeeded", "completed", at=2.0)
    result = judge([done, None], [Failure(1, -11, 1.0)], 2)
    assert (result.outcome, result.reason, result.exit_code) == ("succeeded", "completed", 0)
    assert result.detail == "what it said"


def test_the_first_failure_counts_and_not_those_that_follow_from_it() -> None:
    lost = failed(0, "trainer_crashed", at=0.5, secondary=True)
    bad = failed(2, "data_invalid", at=1.0)
    late = failed(1, "internal_error", at=2.0)
    result = judge([lost, late, bad], [Failure(rank, 1, 3.0) for rank in range(3)], 3)
    assert (result.reason, result.rank, result.exit_code) == ("data_invalid", 2, 3)
    assert result.detail == "rank 2 of 3: what it said"
    # The rank at fault is not always the one that was first to say so.
    named = [failed(rank, "diverged", at=1.0 + rank, at_fault=1) for rank in range(2)]
    assert (judge(named, [], 2).rank, judge(named, [], 2).exit_code) == (1, 7)


@pytest.mark.parametrize(
    ("code", "name", "exit_code", "says"),
    [
        (-9, "SIGKILL", 137, "was ended by SIGKILL"),
        (-64, "SIGRTMAX", 192, "was ended by SIGRTMAX"),
        (3, None, 3, "ended with exit code 3"),
    ],
)
def test_a_rank_without_a_word_is_told_by_its_exit(
    code: int, name: str | None, exit_code: int, says: str
) -> None:
    lost = failed(0, "trainer_crashed", at=1.0, secondary=True)
    result = judge([lost, None], [Failure(1, code, 1.5)], 2)
    assert (result.reason, result.rank, result.signal) == ("trainer_crashed", 1, name)
    assert (result.exit_code, result.step) == (exit_code, 7)
    assert says in result.detail
    written = result.to_json()
    assert (written["ranks"], written["rank"], written["signal"]) == (2, 1, name)


def test_a_stop_counts_where_nobody_failed_by_itself() -> None:
    stopped = end(1, "stopped", "stopped_by_request", at=2.0)
    lost = failed(0, "trainer_crashed", at=1.0, secondary=True)
    assert judge([lost, stopped], [], 2).exit_code == 10
    assert judge([failed(0, "out_of_memory", at=3.0), stopped], [], 2).exit_code == 6
    assert judge([lost, None], [], 2).reason == "trainer_crashed"
    silent = judge([None, None], [], 2, step=5)
    assert (silent.reason, silent.exit_code, silent.step) == ("trainer_crashed", 1, 5)


class Launched:
    """A launcher with two ranks that train, and the ids of all its processes."""

    def __init__(self, spec: Path, workdir: Path) -> None:
        self.workdir = workdir
        self.log = workdir.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fp8core", "train", str(spec), "--workdir", str(workdir)],
                stdout=log,
                stderr=log,
            )
        self.until(lambda: len(self.steps()) >= 3)
        (folder,) = workdir.glob(".ranks-*")
        pids = [RankPlace(rank, 2, folder).read_pid() for rank in range(2)]
        self.ranks = [pid for pid in pids if pid is not None]
        self.agent = parent_of(self.ranks[0])

    def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def steps(self) -> list[int]:
        path = self.workdir / "telemetry.jsonl"
        if not path.exists():
            return []
        return [r["step"] for r, _ in read_records(path) if r["type"] == "progress"]

    def end(self) -> dict[str, Any]:
        """The result, once launcher, torchrun and ranks are gone."""
        code = self.process.wait(120)
        everybody = [*self.ranks, self.agent]
        assert all(pid is None or is_gone(pid) for pid in everybody)
        result = json.loads((self.workdir / "result.json").read_bytes())
        assert result["exit_code"] == code
        assert not list(self.workdir.glob(".ranks-*"))
        return dict(result)


@pytest.fixture
def launch(job: Job, tmp_path: Path) -> Iterator[Callable[[], Launched]]:
    launched: list[Launched] = []

    def start() -> Launched:
        spec = job(
            training={"steps": 100_000},
            evaluation={"fraction": 0.0},
            resources={"device": "cpu", "cpu_ranks": 2},
        )
        launched.append(Launched(spec, tmp_path / f"launched-{len(launched)}"))
        return launched[-1]

    yield start
    for each in launched:
        each.process.kill()
        each.process.wait()


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_within_seconds(launch: Callable[[], Launched]) -> None:
    job = launch()
    began = time.monotonic()
    os.kill(job.ranks[1], signal.SIGKILL)
    result = job.end()
    assert (result["reason"], result["rank"], result["signal"]) == ("trainer_crashed", 1, "SIGKILL")
    assert (result["exit_code"], result["detail"]) == (137, "rank 1 of 2 was ended by SIGKILL")
    assert result["step"] >= 3
    # The bound of a collective is ten minutes; nobody waited for it.
    assert time.monotonic() - began < 60
    assert "[rank 0] error: rank 0 lost the others" in job.log.read_text()


@pytest.mark.slow
def test_killed_ranks_may_take_long_to_be_gone(launch: Callable[[], Launched]) -> None:
    """torchrun is killed, and the ranks with it. As on a busy machine, where they end slowly, their
    lock of the workdir is free a good while later; the result is written all the same."""
    job = launch()
    with (job.workdir / ".lock").open() as held:
        # In the queue for the lock before anybody else.
        waiting = threading.Thread(target=fcntl.flock, args=(held, fcntl.LOCK_EX), daemon=True)
        waiting.start()
        assert job.agent is not None
        os.kill(job.agent, signal.SIGKILL)
        waiting.join(60)
        assert not waiting.is_alive(), "no rank lives"
        with pytest.raises(subprocess.TimeoutExpired):
            job.process.wait(1)
    result = job.end()
    assert (result["reason"], result["outcome"]) == ("trainer_crashed", "failed")
    assert "without a word" in result["detail"]


@pytest.mark.slow
def test_a_rank_that_hangs_is_killed_when_another_fails(launch: Callable[[], Launched]) -> None:
    job = launch()
    os.kill(job.ranks[0], signal.SIGSTOP)
    os.kill(job.ranks[1], signal.SIGKILL)
    result = job.end()
    assert (result["reason"], result["rank"], result["signal"]) == ("trainer_crashed", 1, "SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["launcher", "torchrun"])
def test_whoever_is_asked_to_stop_all_save_once(launch: Callable[[], Launched], who: str) -> None:
    job = launch()
    target = job.process.pid if who == "launcher" else job.agent
    assert target is not None
    os.kill(target, signal.SIGTERM)
    result = job.end()
    assert (result["outcome"], result["exit_code"], result["rank"]) == ("stopped", 10, None)
    records = [r for r, _ in read_records(job.workdir / "telemetry.jsonl")]
    stops = [r["step"] for r in records if r["type"] == "checkpoint" and r["kind"] == "stop"]
    # None where the periodic checkpoint of that very step had just been written.
    assert stops in ([result["step"]], [])
    assert (job.workdir / f"checkpoints/step-{result['step']:08d}/manifest.json").exists()


@pytest.mark.slow
def test_the_death_of_the_launcher_leaves_nobody(launch: Callable[[], Launched]) -> None:
    job = launch()
    job.process.kill()
    job.process.wait()
    everybody = [*job.ranks, job.agent]
    with contextlib.suppress(OSError):
        job.until(lambda: all(pid is None or parent_of(pid) is None for pid in everybody), 10)
    assert not [pid for pid in everybody if pid is not None and parent_of(pid) is not None]
