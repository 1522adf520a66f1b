"""`octrain compare`"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JsonOption, console
from octrain.cli.options import JobsArgument
from octrain.cli.render import least, number, sparkline, table


def compare(
    jobs: JobsArgument,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            "-m",
            help="A metric, or a pattern as 'eval/*'; may be repeated. "
            "Default: train/loss and eval/loss.",
        ),
    ] = None,
    from_step: Annotated[int | None, typer.Option(min=0, help="From this step on.")] = None,
    to_step: Annotated[int | None, typer.Option(min=0, help="Up to this step.")] = None,
    max_points: Annotated[
        int | None, typer.Option(min=3, help="At most so many points of each.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show the same metrics of several jobs beside each other."""
    wanted = metric or ["train/loss", "eval/loss"]
    with context.client() as client:
        series = client.jobs.metrics(
            list(dict.fromkeys(jobs)),
            *wanted,
            from_step=from_step,
            to_step=to_step,
            max_points=max_points,
        )
    if json_output:
        context.print_json(series)
        return
    rows = table("METRIC", "JOB", ">ATTEMPT", ">POINTS", ">FIRST", ">LAST", ">LEAST", "CURVE")
    for one in sorted(series, key=lambda one: one.name):
        values = one.values
        rows.add_row(
            escape(one.name),
            one.job_id or "-",
            str(one.attempt or "-"),
            str(len(values)),
            number(values[0]) if values else "-",
            number(values[-1]) if values else "-",
            number(least(values)),
            sparkline(values),
        )
    console.print(rows if series else "No such metrics yet.")
