"""``train``: one run from spec to model, and its result whatever happens."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fp8core.commands.console import RunConsole, say
from fp8core.commands.error_lines import error_lines
from fp8core.commands.quiet import quieten_libraries
from fp8core.commands.spec_file import read_spec_file
from fp8core.errors import RankLost, TrainingError
from fp8core.spec import Outcome, Reason
from fp8core.telemetry import TelemetryWriter
from fp8core.telemetry.sinks import Sinks
from fp8core.training.build import Places
from fp8core.training.outcome import RunResult
from fp8core.training.position import Position
from fp8core.training.ranks.place import RankPlace
from fp8core.training.ranks.silent import SilentTelemetry
from fp8core.training.run import OnFigures, Run
from fp8core.training.stopping import StopRequest
from fp8core.training.workdir import Workdir

__all__ = ["run_train"]


def run_train(
    spec_path: Path,
    workdir_path: Path,
    roots: list[Path],
    *,
    device: str = "auto",
    job_folder: Path | None = None,
    upload_folder: Path | None = None,
    debug: bool = False,
) -> int:
    """Trains in this process; returns the exit code.

    ``result.json`` in the workdir says the same and more. Where the launcher of several ranks
    started this process, it is one of them, and the launcher writes the result of all.
    """
    place = RankPlace.of_environment()
    stop = StopRequest(patient=place is not None)
    stop.install()
    quieten_libraries()
    job = _Job(spec_path, roots, device, job_folder, upload_folder, debug)
    if place is None:
        with Workdir(workdir_path) as workdir:
            result = job.run(workdir, stop, None)
            _write_result(result, workdir)
        code = result.exit_code
    else:
        place.register()
        code = _as_rank(job, workdir_path, stop, place)
    if job.lost_device is not None:
        _leave(code)
    return code


def _as_rank(job: _Job, workdir_path: Path, stop: StopRequest, place: RankPlace) -> int:
    """One of several: the launcher hears of the end, and writes the result of all.

    0 where the rank did what was asked of it, a stop included: any other exit code is a failure.
    """
    try:
        if place.main:
            with Workdir(workdir_path) as workdir:
                result = job.run(workdir, stop, place)
        else:
            result = job.run(Workdir(workdir_path), stop, place)
    except TrainingError as error:  # of the workdir itself
        say(f"error: {error.line}", sys.stderr)
        result = RunResult.failed(error, 0)
    place.end({**result.to_json(), "rank": result.rank}, secondary=job.lost_others)
    return result.exit_code if result.outcome == Outcome.FAILED else 0


@dataclass
class _Job:
    """What the command line asks for. ``lost_others``: it failed because another rank was gone;
    ``lost_device``: because of this error, after which a process can do nothing more with its GPU.
    It is held to the end: with it go the tensors of all that it passed through, which aborts."""

    spec_path: Path
    roots: list[Path]
    device: str
    job_folder: Path | None
    upload_folder: Path | None
    debug: bool
    lost_others: bool = False
    lost_device: Exception | None = None

    def run(self, workdir: Workdir, stop: StopRequest, place: RankPlace | None) -> RunResult:
        run: Run | None = None
        try:
            spec_file = read_spec_file(self.spec_path, self.roots)
            places = Places(spec_file.roots, spec_file.base, self.job_folder, self.upload_folder)
            with contextlib.ExitStack() as stack:
                telemetry: TelemetryWriter = SilentTelemetry()
                sinks: Sinks | None = None
                on_figures: OnFigures = _unseen
                if place is None or place.main:
                    telemetry = stack.enter_context(TelemetryWriter(workdir.telemetry))
                    sinks = Sinks(spec_file.spec, workdir.path, telemetry)
                    stack.enter_context(sinks)
                    steps = spec_file.spec.training.steps
                    on_figures = stack.enter_context(RunConsole(steps)).figures
                run = Run(
                    spec_file.spec,
                    workdir,
                    telemetry,
                    stop,
                    places=places,
                    device=self.device,
                    on_figures=on_figures,
                    place=place,
                )
                result = run.execute()
                if sinks is not None:
                    sinks.outcome = result.outcome
            if place is None:
                say(result.detail)
            return result
        except Exception as error:
            self.lost_others = place is not None and _means_loss(error)
            self.lost_device = error if _breaks_device(error) else None
            crash_log = workdir.crash_log
            if place is not None and not place.main:
                crash_log = workdir.crash_log_of(place.rank)
            step = 0 if run is None else run.step
            return _failure(error, crash_log, step, debug=self.debug)


def _means_loss(error: Exception) -> bool:
    """Whether an error only tells that another rank is gone, be it from inside an engine."""
    import torch.distributed

    return isinstance(error, RankLost | torch.distributed.DistError)


def _breaks_device(error: Exception) -> bool:
    """Whether CUDA has failed for good: PyTorch's own error, or Transformer Engine's words."""
    import torch

    return isinstance(error, torch.AcceleratorError) or str(error).startswith("CUDA Error: ")


def _leave(code: int) -> NoReturn:
    """Ends the process at once: to free a tensor of a failed GPU aborts, and hides ``code``."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _unseen(position: Position, values: Mapping[str, float]) -> None:
    """Figures of a rank that reports nothing."""


def _failure(error: Exception, crash_log: Path, step: int, *, debug: bool) -> RunResult:
    lines, reason = error_lines(error)
    if reason == Reason.INTERNAL_ERROR and not isinstance(error, TrainingError):
        lines = [f"{lines[0].partition(' (--debug')[0]} (see {crash_log})"]
        try:
            crash_log.write_text(traceback.format_exc())
        except OSError:
            traceback.print_exc()  # the log is the only other place for it
    if debug:
        traceback.print_exc()
    for line in lines:
        say(line, sys.stderr)
    detail = "; ".join(line.removeprefix("error: ") for line in lines)
    rank = error.rank if isinstance(error, TrainingError) else None
    return RunResult(Outcome.FAILED, reason, detail, step, rank=rank)


def _write_result(result: RunResult, workdir: Workdir) -> None:
    try:
        result.write(workdir.result)
    except (TrainingError, OSError) as error:
        # The exit code still says it.
        say(f"error: result.json could not be written: {error}", sys.stderr)
