"""Benchmarks as a person starts them: a process of their own, on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BENCHMARKS", "REPOSITORY", "Ended", "run"]

REPOSITORY = Path(__file__).parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"


@dataclass(frozen=True)
class Ended:
    code: int
    said: str
    errors: str

    def values(self, pattern: str) -> list[float]:
        """What the groups of ``pattern`` caught in all its places, as numbers above zero."""
        found = re.findall(pattern, self.said)
        assert found, f"nothing like {pattern!r} in:\n{self.said}{self.errors}"
        caught = [part for one in found for part in (one if isinstance(one, tuple) else (one,))]
        values = [float(part.replace(",", "")) for part in caught]
        assert all(0 < value < float("inf") for value in values), self.said
        return values


def run(program: str, *words: str, code: int = 0) -> Ended:
    """``python benchmarks/PROGRAM WORDS`` in the repository's folder; it must end with ``code``."""
    # One thread of torch's; what the tests themselves find modules by is not a person's.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, f"benchmarks/{program}", *words],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return Ended(done.returncode, done.stdout, done.stderr)
