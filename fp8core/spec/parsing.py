"""From a submitted document to a JobSpec, or to the list of everything wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from fp8core.spec.document import read_document
from fp8core.spec.job import UNCHECKED, JobSpec
from fp8core.spec.messages import Path, findings_of
from fp8core.spec.problems import MOST_PROBLEMS, Problem, SpecInvalid, pointer_of
from fp8core.spec.rules import broken_rules
from fp8core.spec.spellings import Canonical

# Stand-ins for required parts that are absent or wrong, so that rules about the rest still apply.
_STAND_INS: dict[str, dict[str, Any]] = {
    "model": {"source": "path", "path": "model"},
    "data": {"source": "jsonl", "path": "data"},
    "recipe": {"engine": "emulated", "scaling": "delayed"},
}
_MOST_REPAIRS = 5


def parse_spec(document: Mapping[str, Any] | str | bytes) -> JobSpec:
    """The spec that a document means: JSON text or bytes, or a mapping of JSON values.

    Accepts every spelling (see `fp8core.spec.spellings`) and fills in every default. Raises
    `SpecInvalid` with all problems found, at most 100, one for each place, with pointers into the
    document as it was submitted.
    """
    values, unreadable = read_document(document)
    canonical = Canonical(values)
    earlier = unreadable + canonical.problems
    unreliable = [problem.pointer for problem in earlier]
    try:
        spec = JobSpec.model_validate(canonical.document, context=UNCHECKED)
    except ValidationError as error:
        later = _all_problems(canonical.document, error, unreliable)
    else:
        later = broken_rules(spec, unreliable)
        if not earlier and not later:
            return spec
    told = [replace(problem, pointer=canonical.origin(problem.pointer)) for problem in later]
    told = [problem for problem in told if not _follows(problem, unreadable)]
    distinct = {problem.pointer: problem for problem in reversed([*earlier, *told])}
    raise SpecInvalid([*reversed(distinct.values())][:MOST_PROBLEMS])


def _all_problems(
    document: dict[str, Any], error: ValidationError, unreliable: list[str]
) -> list[Problem]:
    findings = findings_of(error)
    problems = [finding.problem for finding in findings]
    # An unknown key that is a misspelling leaves the field that was meant at its default.
    spoiled = unreliable + [problem.pointer for problem in problems]
    for problem, path, _ in findings:
        if (meant := problem.suggestion) and problem.code == "unknown_key":
            spoiled.append(meant if meant[0] == "/" else pointer_of((*path[:-1], meant)))
    for _ in range(_MOST_REPAIRS if len(findings) < MOST_PROBLEMS else 0):
        for finding in findings:
            spoiled.append(pointer_of(finding.removable))
            document = _without(document, finding.removable)
        document = _STAND_INS | document
        try:
            spec = JobSpec.model_validate(document, context=UNCHECKED)
        except ValidationError as remaining:
            findings = findings_of(remaining)
        else:
            return problems + broken_rules(spec, filter(None, spoiled))
    return problems


def _without(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """A copy of the document without what stands at `path`; the document itself is unchanged."""
    if not path:
        return document
    copy, key = dict(document), str(path[0])
    if len(path) == 1:
        copy.pop(key, None)
    elif isinstance(inner := copy.get(key), dict):
        copy[key] = _without(inner, path[1:])
    return copy


def _follows(problem: Problem, unreadable: list[Problem]) -> bool:
    """Whether a problem only comes of the null that stands in for an unreadable value."""
    return any(
        f"{problem.pointer}/".startswith(f"{cause.pointer}/")
        or (problem.code == "wrong_type" and cause.pointer.rpartition("/")[0] == problem.pointer)
        for cause in unreadable
    )
