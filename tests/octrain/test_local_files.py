"""What the local stack keeps and cleans: its state, its logs, its leftovers."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octrain.cli.render import duration, least, number, size, sparkline
from octrain.local.commands import STACK_VARIABLE
from octrain.local.errors import DataFolderInUse, LocalStackError
from octrain.local.leftovers import end_leftovers, processes_of
from octrain.local.logs import rotate
from octrain.local.processes import is_alive
from octrain.local.stack import LocalStack
from octrain.local.state import ApiState, ServerState, StackState
from tests.damage import damaged


def test_state_comes_back_as_it_was_and_hides_its_secrets(tmp_path: Path) -> None:
    state = StackState(
        ServerState(5, "pw"), ServerState(6, "pw"), ApiState("http://h:1", "k", {"a": "n"})
    )
    state.save(tmp_path)
    assert StackState.load(tmp_path) == state
    assert "pw" not in repr(state)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    (tmp_path / "state.json").write_text('{"postgres": 3}')
    with pytest.raises(ValueError, match="damaged"):
        StackState.load(tmp_path)


def test_a_large_log_is_cut_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for text in (b"a" * 50, b"b" * 50, b"c" * 50):
            os.write(descriptor, text)
            assert rotate(log, limit_bytes=40, kept=2)
        os.write(descriptor, b"after")
    finally:
        os.close(descriptor)
    assert not rotate(log, limit_bytes=40, kept=2)
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"api.log": b"after", "api.log.1": b"c" * 50, "api.log.2": b"b" * 50}


HOLDER = """
import sys, time
from pathlib import Path
from octrain.local.stack import LocalStack
stack = LocalStack(Path(sys.argv[1]))
stack._take_folder()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_serves_one_stack_and_is_free_when_it_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    try:
        with pytest.raises(DataFolderInUse, match=rf"already runs on .* \(process {holder.pid}\)"):
            LocalStack(tmp_path).start()
        assert tmp_path.stat().st_mode & 0o777 == 0o700
    finally:
        holder.kill()
        holder.communicate()
    stack = LocalStack(tmp_path)
    stack._take_folder()
    stack.stop()


FAMILY = """
import subprocess, sys, time
grandchild = subprocess.Popen(
    [sys.executable, "-c", "import signal, time\\n"
     "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(600)"],
    start_new_session=True, env={})
print(grandchild.pid, flush=True)
time.sleep(600)
"""


def test_leftovers_are_found_with_their_descendants_and_nobody_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    trainer = subprocess.Popen(
        [sys.executable, "-c", FAMILY, "fp8core", "train", "--workdir", str(data / "work")],
        stdout=subprocess.PIPE,
        text=True,
    )
    reader = subprocess.Popen(["tail", "-f", str(data / "log"), "/dev/null"], stderr=-3)
    neighbour = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "fp8core", str(tmp_path / "data2")]
    )
    try:
        assert trainer.stdout is not None
        grandchild = int(trainer.stdout.readline())
        assert processes_of(data) == sorted([trainer.pid, grandchild])
        assert set(end_leftovers(data)) == {trainer.pid, grandchild}
        deadline = time.monotonic() + 5
        while is_alive(grandchild) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(grandchild)
        assert reader.poll() is None
        assert neighbour.poll() is None
    finally:
        for process in (trainer, reader, neighbour):
            process.kill()
            process.wait()


def test_a_leftover_is_found_while_its_program_is_still_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Popen returns a moment before the kernel shows the new program's environment, so of many
    that are looked at first of all some show none yet.
    """
    for _ in range(800):
        child = subprocess.Popen(["sleep", "60"], env={STACK_VARIABLE: str(tmp_path)})
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "listdir", lambda _, pid=child.pid: [str(pid)])
                found = processes_of(tmp_path)
        finally:
            child.kill()
            child.wait()
        assert found == [child.pid]


def test_a_taken_port_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        stack = LocalStack(tmp_path, port=squatter.getsockname()[1])
        with pytest.raises(LocalStackError, match="--port"):
            stack._settle_port()


def test_numbers_for_a_person() -> None:
    assert [number(v) for v in (None, 12.0, 0.00012345, float("nan"), 12345.678)] == [
        "-",
        "12",
        "0.0001234",
        "nan",
        "12,346",
    ]
    assert [duration(v) for v in (None, 4.4, 90, 3700, 90000)] == [
        "-",
        "4s",
        "1m30s",
        "1h01m",
        "1d01h",
    ]
    assert [size(v) for v in (None, 10, 2048, 3 * 2**30)] == ["-", "10 B", "2.0 KiB", "3.0 GiB"]
    assert sparkline([1.0, float("nan"), 2.0]) == "▁ █"


def test_the_least_of_values_passes_over_what_is_no_number() -> None:
    assert least([math.nan, 2.0, -math.inf]) == -math.inf
    assert least([math.nan, 2.0, 1.0]) == 1.0
    assert math.isnan(least([math.nan]) or 0.0)
    assert least([]) is None


def test_a_damaged_state_is_told_and_never_used(tmp_path: Path) -> None:
    state = StackState(
        ServerState(5, "pw"), ServerState(6, "pw"), ApiState("http://h:1", "k", {"a": "n"})
    )
    state.save(tmp_path)
    file = tmp_path / "state.json"
    whole = json.dumps(json.loads(file.read_text())).encode() + b"\n"
    for seed in range(300):
        file.write_bytes(damaged(whole, seed))
        try:
            found = StackState.load(tmp_path)
        except ValueError:
            with pytest.raises(ValueError, match=r"state\.json is damaged"):
                StackState.load(tmp_path)
        else:
            assert {type(found.postgres.port), type(found.valkey.port)} == {int}
            found.save(tmp_path)
