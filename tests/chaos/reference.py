"""The losses of runs that nobody disturbs, which the disturbed ones must have to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.stack import SETTINGS
from tests.chaos.trainer import losses
from tests.chaos.users import job_spec

__all__ = ["References"]

_MOST_JOBS = 1000
_SECONDS = 600.0


class References:
    """Trains each real spec once, by the training library alone, from the moment it is made."""

    def __init__(self, folder: Path, root: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._runs: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
        for number in range(_MOST_JOBS):
            kind, seed, spec = job_spec(number)
            if kind != "real" or seed in self._runs:
                continue
            path, work = folder / f"{seed}.json", folder / str(seed)
            path.write_text(json.dumps(spec))
            command = [sys.executable, "-m", "fp8core", "train", str(path), "--workdir", str(work)]
            with (folder / f"{seed}.log").open("wb") as log:
                child = subprocess.Popen(
                    [*command, "--root", str(root), "--device", "cpu"],
                    env={**os.environ, **SETTINGS},
                    stdout=log,
                    stderr=log,
                )
            self._runs[seed] = (child, work)

    def finish(self) -> Mapping[int, list[float]]:
        """Losses from step 1, by the seed of a real job, or by the seed of a scripted one with a
        minus before it.
        """
        found: dict[int, list[float]] = {}
        for seed, (child, work) in self._runs.items():
            if child.wait(_SECONDS) != 0:
                raise RuntimeError(f"the undisturbed run in {work} failed")
            lines = (work / "telemetry.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            found[seed] = [
                record["values"]["train/loss"]
                for record in records
                if record["type"] == "metrics" and "train/loss" in record["values"]
            ]
        for number in range(_MOST_JOBS):
            kind, seed, spec = job_spec(number)
            if kind == "scripted":
                found[-seed] = losses(seed, spec["training"]["steps"])
        return found

    def close(self) -> None:
        for child, _ in self._runs.values():
            if child.poll() is None:
                child.kill()
                child.wait()
