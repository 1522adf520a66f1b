"""Errors as single lines, for the screen and for the result of a run."""

from __future__ import annotations

from fp8core.spec import Reason, SpecInvalid
from fp8core.training.outcome import as_training_error

__all__ = ["error_lines"]


def error_lines(error: BaseException) -> tuple[list[str], Reason]:
    """What a person is told about an error, one line a problem, and its reason."""
    if isinstance(error, SpecInvalid):
        lines = [f"error: {problem}" for problem in error.problems]
        return [" ".join(line.split()) for line in lines], Reason.SPEC_INVALID
    known = as_training_error(error)
    if known is not None:
        return [f"error: {known.line}"], known.reason
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return [f"internal error: {text} (--debug shows where)"], Reason.INTERNAL_ERROR
