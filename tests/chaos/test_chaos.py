"""The chaos run in its short form, and what it is drawn from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from octrain.local.commands import STACK_VARIABLE
from octrain.local.leftovers import processes_of
from tests.chaos.__main__ import Result
from tests.chaos.losses import Losses
from tests.chaos.schedule import DECK, draw_faults, draw_users
from tests.chaos.users import Api
from tests.chaos.watch import TrainerWatch

REPOSITORY = Path(__file__).parents[2]
_MOST_SECONDS = 1080.0


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert draw_faults(7, 600) == draw_faults(7, 600)
    assert draw_users(7, 600, 50) == draw_users(7, 600, 50)
    assert draw_faults(7, 600) != draw_faults(8, 600)


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_hold_a_hundred_faults_of_every_kind(seed: int) -> None:
    faults = draw_faults(seed, 600)
    kinds = Counter(fault.kind for fault in faults)
    assert len(faults) >= 120, "some find no victim, and a hundred must"
    assert set(kinds) == set(DECK)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert faults[-1].at <= 600


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_minute_of_faults_loses_nothing(tmp_path: Path) -> None:
    options = {"seed": 3, "duration": 60, "jobs": 8, "settle": 150, "folder": tmp_path}
    command = [sys.executable, "-m", "tests.chaos"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with (tmp_path / "run.log").open("w+") as log:
        run = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": _paths(), "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=log,
        )
        try:
            run.wait(_MOST_SECONDS)
        finally:
            _end(run)
        log.seek(0)
        told = log.read()
    assert run.returncode == 0, told[-25_000:]
    assert "\nlosses: 0\n" in told
    found = {kind: int(count) for count, kind in re.findall(r"^ +(\d+)  (.+)$", told, re.M)}
    struck = {kind: count for kind, count in found.items() if kind in DECK}
    assert f"\nfaults survived: {sum(struck.values())}\n" in told
    assert sum(struck.values()) >= 10, "a minute of the schedule has thirteen"
    # Of our own processes, of the servers and what they hold, of the network.
    for sort in (r"kill|freeze", r"valkey|postgres|message|disk|checkpoint", r"network"):
        assert any(re.search(sort, kind) for kind in struck), struck
    seen = re.search(r"times at all processes \((\d+) in all, up to (\d+) jobs", told)
    assert seen is not None
    # Servers, nodes, and for each of the jobs a supervisor and a trainer at least.
    assert int(seen[1]) >= 20
    assert int(seen[2]) >= 1
    assert processes_of(tmp_path / "data") == []


@pytest.mark.parametrize(
    ("count", "kinds", "enough"), [(0, 1, False), (9, 6, False), (10, 5, False), (10, 6, True)]
)
def test_a_run_that_does_too_little_is_none(count: int, kinds: int, enough: bool) -> None:
    faults = Counter(dict.fromkeys(list(DECK)[: min(kinds, count)], 1))
    if count:
        faults[next(iter(DECK))] += count - faults.total()
    losses = Losses(cast(Api, None), {})
    assert (Result(faults, 8, losses, 60.0).too_few is None) == enough
    assert Result(faults, 50, losses, 600.0).too_few is not None


def test_a_process_that_is_left_is_seen(tmp_path: Path) -> None:
    """By its id, though it is in a session of its own and no child of the stack's."""
    watch = TrainerWatch(tmp_path)
    left = subprocess.Popen(
        ["sleep", "60"], env={STACK_VARIABLE: str(tmp_path)}, start_new_session=True
    )
    try:
        # Popen returns when exec closes its pipe, a moment before the new environment can be read.
        deadline = time.monotonic() + 10.0
        while not watch.seen and time.monotonic() < deadline:
            watch.look()
        assert (watch.seen, watch.living()) == (1, [left.pid])
    finally:
        left.kill()
        left.wait()
    assert watch.living() == []


def _end(run: subprocess.Popen[bytes]) -> None:
    """Asks a run that is not over to stop its service: killed, it would leave all of it."""
    if run.poll() is None:
        run.terminate()
        try:
            run.wait(30.0)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()


def _paths() -> str:
    return os.pathsep.join(str(REPOSITORY / folder) for folder in (".", "api", "worker"))
