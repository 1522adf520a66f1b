"""``validate``: the spec, and that what it names by path is there."""

from __future__ import annotations

import json

from fp8core.commands.spec_file import SpecFile
from fp8core.errors import DataInvalid, ModelUnavailable, TrainingError
from fp8core.paths import resolve_path
from fp8core.spec import ExitCode

__all__ = ["path_problems", "run_validate"]


def run_validate(spec_file: SpecFile, *, as_json: bool) -> int:
    """Prints ``ok`` or every problem, one a line. The spec itself has been checked already."""
    problems = path_problems(spec_file)
    if as_json:
        found = [
            {"pointer": p.pointer, "message": p.message, "code": p.reason, "suggestion": None}
            for p in problems
        ]
        answer: dict[str, object] = {"valid": not problems, "problems": found}
        if not problems:
            answer["spec"] = spec_file.spec.resolved()
        print(json.dumps(answer, indent=2))
    elif problems:
        for problem in problems:
            print(f"error: {problem.line}")
    else:
        print("ok")
    return int(problems[0].exit_code if problems else ExitCode.OK)


def path_problems(spec_file: SpecFile) -> list[TrainingError]:
    """What is wrong with the paths of a spec: outside the roots, or nothing there."""
    problems: list[TrainingError] = []
    places: tuple[tuple[str, type[TrainingError]], ...] = (
        ("model", ModelUnavailable),
        ("tokenizer", ModelUnavailable),
        ("data", DataInvalid),
    )
    for part, missing in places:
        path = getattr(getattr(spec_file.spec, part), "path", None)
        if path is None:
            continue
        try:
            resolve_path(
                path, spec_file.roots, spec_file.base, pointer=f"/{part}/path", missing=missing
            )
        except TrainingError as error:
            problems.append(error)
    return problems
