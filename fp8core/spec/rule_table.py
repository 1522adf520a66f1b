"""The rules that a spec's fields must keep together, each with the fields that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fp8core.spec.parts import Part
from fp8core.spec.problems import Problem

if TYPE_CHECKING:
    from fp8core.spec.job import JobSpec

__all__ = ["RULES", "Rule", "changed", "conflict", "reads"]

Rule = Callable[["JobSpec"], Iterator[Problem]]
RULES: list[tuple[tuple[str, ...], Rule]] = []


def reads(*pointers: str) -> Callable[[Rule], Rule]:
    """Makes a function a rule; ``pointers`` are the fields that it looks at."""

    def register(rule: Rule) -> Rule:
        RULES.append((pointers, rule))
        return rule

    return register


def conflict(pointer: str, message: str) -> Problem:
    return Problem(pointer, message, "conflict")


def changed(part: Part) -> list[str]:
    """The fields of a part whose value is not their plain default."""
    return [
        name
        for name, field in type(part).model_fields.items()
        if field.default_factory is None and getattr(part, name) != field.default
    ]
