"""What `make` promises of a machine that has less than everything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def test_the_demo_goes_on_where_the_dashboard_cannot_be_built(tmp_path: Path) -> None:
    """As without npm's registry. An installed environment stands in for the installation."""
    if shutil.which("make") is None:
        pytest.skip("no make here")
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints/ci.txt", "tests/api/openapi.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (0, 0))
    for name, line in (("dashboard/build.sh", "exit 1"), (".venv/bin/python", 'echo "ran $*"')):
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()
    done = subprocess.run(
        ["make", "demo"],
        cwd=tmp_path,
        # Those of the make that runs these tests are not meant for this one.
        env={name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "The demo goes on without the dashboard." in done.stderr
    assert "ran -m octrain.demo" in done.stdout.splitlines()
