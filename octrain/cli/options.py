"""Options that several commands take, and what their texts mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

JobsArgument = Annotated[list[str], typer.Argument(help="The ids of jobs.", metavar="JOB...")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set a value of the spec, as training.steps=100; may be repeated."),
]
FileOption = Annotated[
    str | None,
    typer.Option("--file", "-f", help="A YAML or JSON file, or - for standard input."),
]
AllowWaitingOption = Annotated[
    bool,
    typer.Option("--allow-waiting", help="Queue it even if no registered node could run it."),
]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    """``key=value`` texts as a mapping. Errors: typer.BadParameter."""
    found = {}
    for text in texts or []:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"{option} takes key=value, not {text!r}")
        found[key] = value
    return found


def moment(text: str | None, option: str) -> datetime | None:
    """A time: RFC 3339 (local where it has no zone), or how long ago, as ``90m``, ``6h``, ``2d``.

    Errors: typer.BadParameter.
    """
    if text is None:
        return None
    ago = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if ago:
        return datetime.now(UTC) - span(text, option)
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{option} takes a time such as 2026-01-31T12:00:00Z, or how long ago, such as 6h or "
            f"2d, not {text!r}"
        ) from None


def span(text: str, option: str) -> timedelta:
    """How long: ``90s``, ``15m``, ``6h``, ``2d``, ``1w``. Errors: typer.BadParameter."""
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if not found:
        raise typer.BadParameter(f"{option} takes a time such as 90s, 15m, 6h or 2d, not {text!r}")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})
