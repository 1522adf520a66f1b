"""Arguments, exit codes, and errors as single lines; nothing heavy is imported before its use."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8core.commands.error_lines import error_lines
from fp8core.errors import exit_code_of
from fp8core.spec import ExitCode, SpecInvalid

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parsed = _parser().parse_args(arguments)
    _quieten_imports()
    # Read when torch is first imported. By default waiting threads spin, and where other work needs
    # the cores too, a step of a small model takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return _run(parsed)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return int(ExitCode.STOPPED)
    except BrokenPipeError:
        # Whoever read our output went away: what is still buffered must not fail at exit.
        from fp8core.commands.console import silence

        silence(sys.stdout)
        return int(ExitCode.INTERNAL_ERROR)
    except Exception as error:
        if parsed.debug:
            traceback.print_exc()
        lines, reason = error_lines(error)
        code = int(exit_code_of(reason))
        as_json = getattr(parsed, "json", False)
        if as_json and isinstance(error, SpecInvalid):
            problems = [problem.to_dict() for problem in error.problems]
            print(json.dumps({"valid": False, "problems": problems}, indent=2))
            return code
        for line in lines:
            # What is wrong with a spec is what validate was asked for.
            print(line, file=sys.stdout if parsed.command == "validate" else sys.stderr)
        return code


def _quieten_imports() -> None:
    """transformers imports an installed torchao, which warns of builds that are not this one."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.command == "spare":
        from fp8core.commands.spare import run_spare

        return run_spare(debug=parsed.debug)
    if parsed.command == "train":
        return _train(parsed)
    from fp8core.commands.spec_file import read_spec_file

    spec_file = read_spec_file(parsed.spec, parsed.root)
    if parsed.command == "validate":
        from fp8core.commands.validate import run_validate

        return run_validate(spec_file, as_json=parsed.json)
    if parsed.command == "convert":
        from fp8core.commands.convert import run_convert

        return run_convert(spec_file, parsed.job_folder, parsed.upload_folder, device=parsed.device)
    from fp8core.commands.plan import run_plan

    return run_plan(spec_file, parsed.job_folder, as_json=parsed.json, card=parsed.card)


def _train(parsed: argparse.Namespace) -> int:
    from fp8core.commands.ranks import ranks_to_start, run_ranks, train_arguments
    from fp8core.training.ranks.place import RankPlace, die_with_parent

    if RankPlace.of_environment() is not None:
        die_with_parent()
    wanted: dict[str, Any] = {
        "device": parsed.device,
        "job_folder": parsed.job_folder,
        "upload_folder": parsed.upload_folder,
        "debug": parsed.debug,
    }
    ranks = ranks_to_start(parsed.spec, parsed.root)
    if ranks > 1:
        arguments = train_arguments(parsed.spec, parsed.workdir, parsed.root, **wanted)
        return run_ranks(ranks, arguments, parsed.workdir)
    from fp8core.commands.imports import importing

    with importing():
        from fp8core.commands.train import run_train

    return run_train(parsed.spec, parsed.workdir, parsed.root, **wanted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp8core", description="Train models in 8-bit floating point."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--debug", action="store_true", help="print the traceback of an internal error"
    )
    with_spec = argparse.ArgumentParser(add_help=False, parents=[common])
    with_spec.add_argument("spec", type=Path, help="the job specification, a JSON file")
    with_spec.add_argument(
        "--root",
        type=Path,
        action="append",
        default=[],
        help="a folder below which every path of the spec must lie; may be repeated",
    )
    places = argparse.ArgumentParser(add_help=False)
    places.add_argument(
        "--job-folder", type=Path, help="the checkpoint that a model of source job stands for"
    )
    places.add_argument(
        "--upload-folder", type=Path, help="the files that data of source upload stand for"
    )
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")

    train = commands.add_parser(
        "train",
        parents=[with_spec, places, device],
        help="train; goes on by itself when the workdir has a checkpoint",
    )
    train.add_argument("--workdir", type=Path, required=True, help="where everything is written")
    commands.add_parser(
        "convert",
        parents=[with_spec, places, device],
        help="print what becomes of every Linear and norm of the model, as JSON",
    )
    plan = commands.add_parser(
        "plan",
        parents=[with_spec, places],
        help="parameters, memory and FLOPs, without loading weights",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument(
        "--card", help="the name of the GPU it would run on; default: this machine's, if any"
    )
    validate = commands.add_parser(
        "validate", parents=[with_spec], help="check a spec; print ok or every problem"
    )
    validate.add_argument("--json", action="store_true", help="print JSON instead of lines")
    commands.add_parser(
        "spare",
        parents=[common],
        help="import everything, wait for one JSON line on stdin, train what it names",
    )
    return parser
