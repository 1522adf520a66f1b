"""``train``: one run from spec to model, and its result whatever happens."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from fp8core.commands.cli import error_lines
from fp8core.commands.console import RunConsole, say
from fp8core.commands.quiet import quieten_libraries
from fp8core.commands.spec_file import read_spec_file
from fp8core.errors import TrainingError
from fp8core.spec import Outcome, Reason
from fp8core.telemetry import TelemetryWriter
from fp8core.telemetry.sinks import Sinks
from fp8core.training.build import Places
from fp8core.training.outcome import RunResult
from fp8core.training.run import Run
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
    """Trains; returns the exit code. ``result.json`` in the workdir says the same and more."""
    stop = StopRequest()
    stop.install()
    quieten_libraries()
    with Workdir(workdir_path) as workdir:
        run: Run | None = None
        try:
            spec_file = read_spec_file(spec_path, roots)
            places = Places(spec_file.roots, spec_file.base, job_folder, upload_folder)
            steps = spec_file.spec.training.steps
            with (
                TelemetryWriter(workdir.telemetry) as telemetry,
                Sinks(spec_file.spec, workdir.path, telemetry) as sinks,
                RunConsole(steps) as console,
            ):
                run = Run(
                    spec_file.spec,
                    workdir,
                    telemetry,
                    stop,
                    places=places,
                    device=device,
                    on_figures=console.figures,
                )
                result = run.execute()
                sinks.outcome = result.outcome
            say(result.detail)
        except Exception as error:
            result = _failure(error, workdir, 0 if run is None else run.step, debug=debug)
        _write_result(result, workdir)
        return int(result.exit_code)


def _failure(error: Exception, workdir: Workdir, step: int, *, debug: bool) -> RunResult:
    lines, reason = error_lines(error)
    if reason == Reason.INTERNAL_ERROR and not isinstance(error, TrainingError):
        lines = [f"{lines[0].partition(' (--debug')[0]} (see {workdir.crash_log})"]
        try:
            workdir.crash_log.write_text(traceback.format_exc())
        except OSError:
            traceback.print_exc()  # the log is the only other place for it
    if debug:
        traceback.print_exc()
    for line in lines:
        say(line, sys.stderr)
    detail = "; ".join(line.removeprefix("error: ") for line in lines)
    return RunResult(Outcome.FAILED, reason, detail, step)


def _write_result(result: RunResult, workdir: Workdir) -> None:
    try:
        result.write(workdir.result)
    except (TrainingError, OSError) as error:
        # The exit code still says it.
        say(f"error: result.json could not be written: {error}", sys.stderr)
