"""`octrain logs`, `metrics`, `events`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JobArgument, JsonOption, console
from octrain.cli.render import least, number, sparkline, table
from octrain.client import Job, LogFilter


def logs(
    job: JobArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=1, help="Begin with the last so many.")
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(help="Only these: debug, info, warning, error, critical; may be repeated."),
    ] = None,
    grep: Annotated[
        str | None, typer.Option(help="Only lines with this text, in any case.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only of this attempt.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only of this rank.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the log so far as this file.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Print what the trainer said (with --json: one JSON object a line)."""
    wanted = LogFilter(levels=level or (), text=grep, attempt=attempt, rank=rank)
    if output is not None and (follow or tail is not None):
        raise typer.BadParameter("--output saves the whole log: without --follow and --tail")
    with context.client() as client:
        handle = client.jobs.get(job)
        if output is not None:
            _print_saved(handle.save_log(output, wanted), json_output)
            return
        if follow:
            lines = handle.follow_logs(tail=tail, wanted=wanted)
        else:
            lines = handle.logs(tail=tail, wanted=wanted)
        for line in lines:
            print(line.model_dump_json() if json_output else line.text, flush=follow)


def metrics(
    job: JobArgument,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Metrics such as train/loss, or patterns as 'fp8/*/amax'; all without."
        ),
    ] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Only the newest value of each.")
    ] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only of this attempt.")] = None,
    from_step: Annotated[int | None, typer.Option(min=0, help="From this step on.")] = None,
    to_step: Annotated[int | None, typer.Option(min=0, help="Up to this step.")] = None,
    max_points: Annotated[
        int | None, typer.Option(min=3, help="At most so many points of each.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Save them as this file, by its end .csv or .arrow."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show metrics and their curves."""
    narrowed = any(value is not None for value in (attempt, from_step, to_step))
    if latest and (narrowed or max_points is not None or output is not None):
        raise typer.BadParameter("--latest goes with names alone")
    if output is not None and narrowed:
        raise typer.BadParameter("--output goes with names and --max-points alone")
    with context.client() as client:
        handle = client.jobs.get(job)
        if latest:
            _print_latest(handle, names or [], json_output)
            return
        if output is not None:
            if output.suffix not in (".csv", ".arrow", ".arrows"):
                raise typer.BadParameter("--output: the name must end in .csv or .arrow")
            saved = handle.save_metrics(output, *(names or []), max_points=max_points)
            _print_saved(saved, json_output)
            return
        series = handle.metrics(
            *(names or []),
            attempt=attempt,
            from_step=from_step,
            to_step=to_step,
            max_points=max_points,
        )
    if json_output:
        context.print_json(series)
        return
    if not series:
        console.print("No such metrics yet." if names else "No metrics yet.")
        return
    rows = table("METRIC", ">ATTEMPT", ">POINTS", ">FIRST", ">LAST", ">LEAST", "CURVE")
    for one in series:
        values = one.values
        rows.add_row(
            escape(one.name),
            str(one.attempt or "-"),
            str(len(values)),
            number(values[0]) if values else "-",
            number(values[-1]) if values else "-",
            number(least(values)),
            sparkline(values),
        )
    console.print(rows)


def _print_saved(file: Path, json_output: bool) -> None:
    if json_output:
        context.print_json({"file": str(file.absolute())})
    else:
        console.print(f"Saved {escape(str(file))}", highlight=False)


def _follow_all(json_output: bool) -> None:
    with context.client() as client:
        for event in client.events():
            if json_output:
                told = {"id": event.id, "type": event.type, "data": event.data}
                print(json.dumps(told), flush=True)
            elif "job_id" in event.data:
                what = event.data.get("message") or event.data.get("status") or ""
                print(f"{event.data['job_id']} {event.type} {what}".rstrip(), flush=True)


def _print_latest(job: Job, names: list[str], json_output: bool) -> None:
    found = list(job.latest_metrics(*names))
    if json_output:
        context.print_json(found)
        return
    rows = table("METRIC", ">ATTEMPT", ">STEP", ">NEWEST")
    for one in found:
        rows.add_row(escape(one.name), str(one.attempt or "-"), str(one.step), number(one.value))
    console.print(rows if found else "No such metrics yet.")


def events(
    job: Annotated[
        str | None, typer.Argument(help="The id of the job; all jobs without.", metavar="[JOB]")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    json_output: JsonOption = False,
) -> None:
    """List what happened to a job, also to one that was deleted; oldest first.

    Without a job: what happens to all of your jobs from now on, until Ctrl-C; with --json one
    JSON object a line.
    """
    if job is None:
        if kind:
            raise typer.BadParameter("--kind goes with a job")
        _follow_all(json_output)
        return
    with context.client() as client:
        found = list(client.jobs.events(job, kinds=kind))
    if json_output:
        context.print_json(found)
        return
    rows = table(">NUMBER", "TIME", "KIND", "BY", "WHAT")
    for one in found:
        when = one.time.astimezone().strftime("%Y-%m-%d %H:%M:%S") if one.time else "-"
        rows.add_row(
            str(one.seq), when, escape(one.kind), escape(one.actor or "-"), escape(one.message)
        )
    console.print(rows if found else "No such events.")
