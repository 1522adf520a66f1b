"""`octrain up` as a person runs it: start, use from the same machine, stop, start again, kill."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octrain.client import Client
from octrain.demo import BASELINE_RECIPE, spec
from octrain.local.leftovers import processes_of
from octrain.local.processes import is_alive, servers_in
from octrain.local.state import StackState

pytestmark = pytest.mark.e2e


SERVICE_FREE = {
    name: value
    for name, value in os.environ.items()
    if name not in ("DATABASE_URL", "REDIS_URL", "OCTRAIN_API_URL", "OCTRAIN_API_KEY")
}


class Up:
    """One `octrain up`; its output so far in ``text``."""

    def __init__(self, data_dir: Path, port: int = 0) -> None:
        self.data_dir = data_dir
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "octrain",
                "up",
                "--data-dir",
                str(data_dir),
                "--port",
                str(port),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**SERVICE_FREE, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
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

    @property
    def start_seconds(self) -> float:
        found = re.search(r"Octrain is ready after ([\d.]+) s", self.text)
        assert found is not None, self.text
        return float(found[1])

    def stop(self, number: signal.Signals) -> None:
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(30) == 0
        assert time.monotonic() - began < 15, "it promises 10 s, on a machine that is free"

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
    """Ended by Ctrl-C, by SIGKILL of the launcher and by SIGTERM; the job goes on each time."""
    first = up()
    first.read_until("Nodes ready: local")
    state = StackState.load(first.data_dir)
    assert re.search(rf"API key +{re.escape(state.api.key)} ", first.text)
    assert first.data_dir.stat().st_mode & 0o777 == 0o700

    printed = re.search(r"^API +(\S+)", first.text, re.MULTILINE)
    assert printed is not None, first.text
    with Client(printed[1], state.api.key) as named:
        assert [node.name for node in named.nodes()] == ["local"], "the printed URL is a client's"

    found_by = f"export OCTRAIN_DATA_DIR={shlex.quote(str(first.data_dir))} "
    assert found_by in first.text, "its folder is not where other commands look"
    use_only(monkeypatch, first.data_dir)
    with Client() as client:
        assert [node.name for node in client.nodes()] == ["local"]
        second = Up(first.data_dir)
        second.text = second.process.communicate(timeout=30)[0]
        assert second.process.returncode == 1
        assert f"already runs on {first.data_dir} (process {first.process.pid})" in second.text
        assert answers(client), "the first one has not noticed"

        api = first.child("octrain_api serve")
        os.kill(api, signal.SIGKILL)
        first.read_until("api ended (signal 9); starting it again")
        until(lambda: answers(client), 20, "the API answers again")
        first.read_until("api is up again at http://")

        job = client.jobs.create(long_job())
        until(lambda: job.refresh().data.progress.step > 5, 90, "the job trains")
    trainer = first.child("fp8core")
    first.stop(signal.SIGINT)
    assert not is_alive(trainer)
    assert first.nothing_is_left()

    # What a crash of the machine would leave: files that say that servers run.
    (first.data_dir / "postgres" / "postmaster.pid").write_text(
        f"{os.getpid()}\n{first.data_dir / 'postgres'}\n1\n5432\n\n127.0.0.1\n\nready\n"
    )
    again = up()
    again.read_until("Octrain is ready")
    print(f"\nfirst start {first.start_seconds} s, later start {again.start_seconds} s")
    assert first.start_seconds < 30
    assert again.start_seconds < 20
    again.read_until("logs")
    assert state.api.key not in again.text, "the key is shown once"
    kept = re.search(r"^API key +as before .*: api\.key in (\S+)\)", again.text, re.MULTILINE)
    assert kept is not None, again.text
    assert json.loads(Path(kept[1]).read_text())["api"]["key"] == state.api.key
    with Client() as client:
        job = client.jobs.get(job.id)
        reached = job.data.progress.step
        assert not job.is_final
        until(lambda: len(job.refresh().data.attempts) == 2, 60, "a second attempt")
        until(lambda: job.refresh().data.progress.step > reached, 90, "it goes on")
        first_steps, second_steps = (s.steps for s in job.metrics("train/loss"))
        assert first_steps[-1] + 1 == second_steps[0], "it went on where it had stopped"
        assert job.data.restarts == 0, "an orderly stop costs no restart"

    again.process.kill()
    again.process.wait()
    until(again.nothing_is_left, 20, "everything ends after SIGKILL of the launcher")
    third = up()
    third.read_until("Octrain is ready")
    with Client() as client:
        job = client.jobs.get(job.id)
        assert not job.is_final
        reached = job.data.progress.step
        until(lambda: len(job.refresh().data.attempts) == 3, 60, "a third attempt")
        until(lambda: job.refresh().data.progress.step > reached, 90, "it goes on")
        assert job.cancel().wait(60).status == "cancelled"
    third.stop(signal.SIGTERM)
    assert third.nothing_is_left()


def test_a_port_that_is_taken(up: Callable[[], Up], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one = Up(tmp_path / "data", port)
        text = one.process.communicate(timeout=60)[0]
    assert one.process.returncode == 1
    assert f"Port {port} of 127.0.0.1 is taken by another program" in text
    assert "--port" in text
    assert "Traceback" not in text
    assert one.nothing_is_left()


def test_a_state_file_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "state.json").write_text("{")
    one = Up(tmp_path / "data")
    text = one.process.communicate(timeout=60)[0]
    assert one.process.returncode == 1
    assert "state.json is damaged" in text.replace("\n", "")
    assert "Traceback" not in text


def long_job() -> dict[str, Any]:
    made = spec("long", BASELINE_RECIPE, steps=100_000)
    made["model"]["config"] |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    made["tokenizer"] = "bytes"
    made["training"] |= {"batch_size": 2, "sequence_length": 32}
    made["evaluation"] = {"every_steps": 0, "max_batches": 1}
    made["checkpoint"] = {"every_steps": 50, "keep_last": 2}
    made["limits"] = {"restart_backoff_seconds": 0}
    return made


def use_only(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> None:
    """`Client()` finds the stack of this folder by itself."""
    for name in ("OCTRAIN_API_URL", "OCTRAIN_API_KEY", "DATABASE_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OCTRAIN_DATA_DIR", str(data_dir))


def answers(client: Client) -> bool:
    try:
        client.nodes()
    except Exception:
        return False
    return True
