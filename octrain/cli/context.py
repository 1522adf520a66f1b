"""What the commands share: the server they talk to and how they print."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

from octrain.client import Client

url: str | None = None  # of the option --url
console = Console()
PIPE_WIDTH = 240  # characters

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
JobArgument = Annotated[str, typer.Argument(help="The id of the job.", metavar="JOB")]


def fit_console() -> None:
    """Let tables have the width of the terminal; into a pipe or a file nothing is cut off.

    An id of half its length is no use to what reads the pipe, whatever ``COLUMNS`` says.
    """
    if not sys.stdout.isatty():
        console.width = PIPE_WIDTH


def client() -> Client:
    """A client for the server that options, environment or local stack name."""
    return Client(url)


def as_json(value: Any) -> Any:
    """The JSON form of answers; NaN and infinities as strings, as the server gives them."""
    if isinstance(value, BaseModel):
        return json.loads(value.model_dump_json())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [as_json(item) for item in value]
    return value


def print_json(value: Any) -> None:
    """One JSON document on standard output, without colours or wrapping."""
    print(json.dumps(as_json(value), indent=2, ensure_ascii=False))
