"""`octrain submit`"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octrain.cli import EXIT_JOB_NOT_SUCCEEDED, context
from octrain.cli.context import JsonOption, console
from octrain.cli.watch import JobBars


def submit(
    spec: Annotated[str, typer.Argument(help="A JSON file, or - for standard input.")],
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow it to its end; status 5 unless it succeeds.")
    ] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Submitting twice with one key makes one job.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Submit a job."""
    content = read_spec(spec)
    with context.client() as client:
        job = client.jobs.create(content, idempotency_key=idempotency_key)
        if not json_output:
            console.print(f"{job.id} {job.status}", highlight=False)
        if wait and json_output:
            job.wait()
        elif wait:
            with JobBars(console) as bars:
                bars.watch(job)
            if job.data.detail:
                console.print(job.data.detail, markup=False, highlight=False)
        if json_output:
            context.print_json(job.data)
        if wait and job.status != "succeeded":
            raise typer.Exit(EXIT_JOB_NOT_SUCCEEDED)


def read_spec(source: str) -> dict[str, Any]:
    """The JSON object in a file or on standard input. Errors: typer.BadParameter."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"Cannot read {source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{source} is not UTF-8 text") from None
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise typer.BadParameter(f"{source} is not JSON: {error.msg} ({where})") from None
    if not isinstance(spec, dict):
        raise typer.BadParameter(f"{source} must hold a JSON object, not a {type(spec).__name__}")
    return spec
