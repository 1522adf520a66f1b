"""``train`` for a spec of several ranks: starts them, waits, and writes the result of all.

Imports no torch: this process only watches.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from fp8core.commands.spec_file import read_spec_file
from fp8core.durable import told_when_full
from fp8core.errors import TrainingError
from fp8core.training.outcome import RunResult
from fp8core.training.ranks.launcher import Launcher
from fp8core.training.ranks.place import FOLDER_VARIABLE
from fp8core.training.workdir import Workdir

__all__ = ["ranks_to_start", "run_ranks", "train_arguments"]

_LOCK_SECONDS = 5.0


def ranks_to_start(spec_path: Path, roots: list[Path]) -> int:
    """How many ranks are to be started for a spec; 1 where this process is to train by itself.

    So it is for a rank, for what torchrun started without us, and for a spec that cannot be read:
    those are refused where a training begins.
    """
    if FOLDER_VARIABLE in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        return 1
    try:
        return read_spec_file(spec_path, roots).spec.resources.ranks
    except Exception:  # to be told by the training
        return 1


def run_ranks(ranks: int, arguments: list[str], workdir: Path) -> int:
    """Runs ``python -m fp8core ARGUMENTS`` as so many ranks; returns the exit code of all."""
    with told_when_full(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(arguments, ranks, workdir.absolute())
    result = launcher.run()
    stream = sys.stdout if result.exit_code in (0, 10) else sys.stderr
    print(result.detail, file=stream, flush=True)
    try:
        _write(result, workdir)
    except (TrainingError, OSError) as error:
        # The exit code still says it.
        print(f"error: result.json could not be written: {error}", file=sys.stderr)
    return result.exit_code


def _write(result: RunResult, workdir: Path) -> None:
    """Writes it with the workdir held for this alone: where another trainer is at work, the result
    is none of that run. A rank that was killed before it had said its name may be ending still."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            with Workdir(workdir) as place:
                result.write(place.result)
            return
        except TrainingError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def train_arguments(
    spec: Path,
    workdir: Path,
    roots: list[Path],
    *,
    device: str = "auto",
    job_folder: Path | None = None,
    upload_folder: Path | None = None,
    debug: bool = False,
) -> list[str]:
    """The command line of ``python -m fp8core`` that trains so."""
    arguments = ["train", str(spec), "--workdir", str(workdir), "--device", device]
    for root in roots:
        arguments += ["--root", str(root)]
    if job_folder is not None:
        arguments += ["--job-folder", str(job_folder)]
    if upload_folder is not None:
        arguments += ["--upload-folder", str(upload_folder)]
    return arguments + (["--debug"] if debug else [])
