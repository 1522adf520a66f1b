"""The losses of runs that nobody disturbs, which the disturbed ones must have to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.stack import SETTINGS
from tests.chaos.trainer import losses
from tests.chaos.users import PostedJob, job_spec

__all__ = ["References"]

_SECONDS = 600.0


class References:
    """Trains each real spec once, by the training library alone: those of the first ``jobs`` jobs
    from the moment it is made, so that they are over before any fault, and others when asked.
    """

    def __init__(self, folder: Path, root: Path, jobs: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._root = folder, root
        self._runs: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
        for number in range(jobs):
            kind, seed, spec = job_spec(number)
            if kind == "real":
                self._begin(seed, spec)

    def _begin(self, seed: int, spec: Mapping[str, Any]) -> None:
        if seed in self._runs:
            return
        path, work = self._folder / f"{seed}.json", self._folder / str(seed)
        path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "fp8core", "train", str(path), "--workdir", str(work)]
        with (self._folder / f"{seed}.log").open("wb") as log:
            child = subprocess.Popen(
                [*command, "--root", str(self._root), "--device", "cpu"],
                env={**os.environ, **SETTINGS},
                stdout=log,
                stderr=log,
            )
        self._runs[seed] = (child, work)

    def finish(self) -> None:
        """Wait for all that have begun."""
        for child, work in self._runs.values():
            if child.wait(_SECONDS) != 0:
                raise RuntimeError(f"the undisturbed run in {work} failed")

    def of(self, jobs: Sequence[PostedJob]) -> Mapping[int, list[float]]:
        """Losses from step 1, by the seed of a real job, or by the seed of a scripted one with a
        minus before it.
        """
        for job in jobs:
            if job.kind == "real":
                self._begin(job.seed, job.spec)
        self.finish()
        found = {-job.seed: losses(job.seed, job.steps) for job in jobs if job.kind == "scripted"}
        for seed, (_, work) in self._runs.items():
            lines = (work / "telemetry.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            found[seed] = [
                record["values"]["train/loss"]
                for record in records
                if record["type"] == "metrics" and "train/loss" in record["values"]
            ]
        return found

    def close(self) -> None:
        for child, _ in self._runs.values():
            if child.poll() is None:
                child.kill()
                child.wait()
