"""`octrain up` as a person runs it: start, use from the same machine, stop, start again, kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octrain.client import Client
from octrain.demo import BASELINE_RECIPE, spec
from octrain.local.leftovers import processes_of
from octrain.local.processes import is_alive, servers_in
from octrain.local.state import StackState

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Up:
    """One `octrain up`; its output so far in ``text``."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octrain", "up", "--data-dir", str(data_dir), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        self.text = ""

    def read_until(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if words in line:
                return
        pytest.fail(f"ended with {self.process.wait()} before {words!r}:\n{self.text}")

    def child(self, words: str) -> int:
        for pid in processes_of(self.data_dir):
            if words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                return pid
        raise AssertionError(f"no {words} among the processes of the stack")

    def nothing_is_left(self) -> bool:
        servers = servers_in(self.data_dir / "postgres", "postgres")
        servers += servers_in(self.data_dir / "valkey", "valkey")
        return not servers and not processes_of(self.data_dir)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.communicate(timeout=30)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[[], Up]]:
    started: list[Up] = []

    def start() -> Up:
        started.append(Up(tmp_path / "data"))
        return started[-1]

    yield start
    for one in started:
        one.end()


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def test_start_use_restart_and_stop(up: Callable[[], Up], monkeypatch: pytest.MonkeyPatch) -> None:
    first = up()
    first.read_until("Nodes ready: local")
    state = StackState.load(first.data_dir)
    assert re.search(rf"API key +{re.escape(state.api.key)} ", first.text)
    assert first.data_dir.stat().st_mode & 0o777 == 0o700

    monkeypatch.setenv("OCTRAIN_DATA_DIR", str(first.data_dir))
    with Client() as client:
        assert [node.name for node in client.nodes()] == ["local"]

        second = Up(first.data_dir)
        second.text = second.process.communicate(timeout=30)[0]
        assert second.process.returncode == 1
        assert f"already runs on {first.data_dir} (process {first.process.pid})" in second.text

        api = first.child("octrain_api serve")
        os.kill(api, signal.SIGKILL)
        first.read_until("api ended (signal 9); starting it again")
        until(lambda: answers(client), 20, "the API answers again")

    began = time.monotonic()
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(15) == 0
    assert time.monotonic() - began < 10
    assert first.nothing_is_left()

    again = up()
    again.read_until("Nodes ready: local")
    assert state.api.key not in again.text, "the key is shown once"
    with Client() as client:
        assert answers(client)

    again.process.kill()
    again.process.wait()
    until(again.nothing_is_left, 15, "everything ends after SIGKILL of the launcher")


def answers(client: Client) -> bool:
    try:
        client.nodes()
    except Exception:
        return False
    return True


def test_a_running_job_goes_on_at_the_next_start(
    up: Callable[[], Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = up()
    monkeypatch.setenv("OCTRAIN_DATA_DIR", str(first.data_dir))
    first.read_until("Nodes ready: local")
    with Client() as client:
        job = client.jobs.create(spec("long", BASELINE_RECIPE, steps=20_000))
        until(lambda: job.refresh().data.progress.step > 5, 90, "the job trains")
    trainer = first.child("fp8core")
    began = time.monotonic()
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(15) == 0
    assert time.monotonic() - began < 10
    assert not is_alive(trainer)

    second = up()
    second.read_until("Octrain is ready")
    with Client() as client:
        job = client.jobs.get(job.id)
        reached = job.data.progress.step
        assert not job.is_final
        until(lambda: len(job.refresh().data.attempts) == 2, 60, "a second attempt")
        until(lambda: job.refresh().data.progress.step > reached, 90, "it goes on")
        started = job.metrics("train/loss")
        steps = {series.attempt: series.steps for series in started}
        assert steps[2][0] > 1, "the second attempt began at the checkpoint, not at step 1"
        assert job.cancel().wait(60).status == "cancelled"
