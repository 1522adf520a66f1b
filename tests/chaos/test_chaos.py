"""The chaos run in its short form, and what it is drawn from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.schedule import DECK, draw_faults, draw_users

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
