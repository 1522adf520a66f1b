"""`octrain ls`, `show`, `logs`, `metrics`, `cancel`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JobArgument, JsonOption, console
from octrain.cli.render import age, duration, number, progress_text, sparkline, status_text, table
from octrain.client import JobData, LogFilter


def ls(
    status: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only with this label, as key=value; may be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only with this name.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 20,
    json_output: JsonOption = False,
) -> None:
    """List jobs, the newest first."""
    labels = {}
    for text in label or []:
        key, separator, value = text.partition("=")
        if not separator:
            raise typer.BadParameter(f"--label takes key=value, not {text!r}")
        labels[key] = value
    with context.client() as client:
        found = [
            job.data
            for job in client.jobs.list(status=status, name=name, labels=labels, limit=limit)
        ]
    if json_output:
        context.print_json(found)
        return
    if not found:
        console.print("No jobs." if not (status or label or name) else "No such jobs.")
        return
    rows = table("ID", "NAME", "STATUS", ">STEP", ">LOSS", ">TOKENS/S", ">ETA", ">AGE")
    for job in found:
        rows.add_row(
            job.id,
            escape(job.name or "-"),
            status_text(job),
            progress_text(job),
            number(job.latest_metrics.get("train/loss")),
            number(job.latest_metrics.get("perf/tokens_per_second")),
            "-" if job.is_final else duration(job.progress.eta_seconds),
            age(job.created_at),
        )
    console.print(rows)


def show(
    job: JobArgument,
    conversion: Annotated[
        bool, typer.Option("--conversion", help="Also each layer: converted, or why not.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Show one job: state, attempts, newest metrics, what was converted."""
    with context.client() as client:
        handle = client.jobs.get(job)
        rows = handle.conversion() if conversion else []
    if json_output:
        shown = context.as_json(handle.data)
        context.print_json({**shown, "conversion": rows} if conversion else shown)
        return
    _print_state(handle.data)
    _print_attempts(handle.data)
    if handle.data.latest_metrics:
        metrics = table("METRIC", ">NEWEST")
        health = 0
        for name, value in sorted(handle.data.latest_metrics.items()):
            if name.startswith("fp8/"):
                health += 1
            else:
                metrics.add_row(name, number(value))
        console.print(metrics)
        if health:
            console.print(f"and {health} FP8 health metrics: octrain metrics {handle.id}")
    if conversion:
        layers = table("LAYER", "FROM", "TO", "REASON")
        for row in rows:
            layers.add_row(
                *(escape(str(row.get(k) or "-")) for k in ("name", "from", "to", "reason"))
            )
        console.print(layers)


def _print_state(job: JobData) -> None:
    facts = table("", "")
    facts.show_header = False
    recipe = job.spec.get("recipe", {})
    fields = {
        "job": job.id,
        "name": escape(job.name or "-"),
        "status": status_text(job),
        "detail": escape(job.detail or ""),
        "waiting for": escape(job.waiting_for or ""),
        "step": f"{progress_text(job)}, {job.progress.tokens:,} tokens",
        "time left": "" if job.is_final else duration(job.progress.eta_seconds),
        "recipe": escape(" ".join(f"{k}={v}" for k, v in recipe.items() if v is not None)),
        "device": job.device or "",
        "labels": escape(" ".join(f"{k}={v}" for k, v in job.labels.items())),
        "owner": escape(job.owner or ""),
        "submitted": f"{age(job.created_at)} ago",
    }
    for name, value in fields.items():
        if value:
            facts.add_row(f"[bold]{name}[/]", value)
    console.print(facts)


def _print_attempts(job: JobData) -> None:
    if not job.attempts:
        return
    attempts = table(">ATTEMPT", "NODE", "STATUS", "REASON", ">TIME", "DETAIL")
    for attempt in job.attempts:
        seconds = None
        if attempt.started_at and attempt.ended_at:
            seconds = (attempt.ended_at - attempt.started_at).total_seconds()
        attempts.add_row(
            str(attempt.number),
            escape(attempt.node or "-"),
            attempt.status,
            attempt.reason or "-",
            duration(seconds) if seconds is not None else age(attempt.started_at),
            escape(attempt.detail or ""),
        )
    console.print(attempts)


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
    if output is not None and (follow or tail is not None or json_output):
        raise typer.BadParameter("--output saves the whole log: without --follow, --tail, --json")
    with context.client() as client:
        handle = client.jobs.get(job)
        if output is not None:
            console.print(f"Saved {escape(str(handle.save_log(output, wanted)))}", highlight=False)
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
        list[str] | None, typer.Argument(help="Metrics such as train/loss; all without.")
    ] = None,
    max_points: Annotated[
        int | None, typer.Option(min=2, help="At most so many points of each.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show metrics and their curves."""
    with context.client() as client:
        series = client.jobs.get(job).metrics(*(names or []), max_points=max_points)
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
            number(min(values)) if values else "-",
            sparkline(values),
        )
    console.print(rows)


def cancel(
    job: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has ended.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Cancel a job; it keeps its checkpoints. A job that has ended stays as it is."""
    with context.client() as client:
        handle = client.jobs.get(job).cancel()
        if wait:
            handle.wait()
    if json_output:
        context.print_json(handle.data)
    else:
        console.print(f"{handle.id} {status_text(handle.data)}", highlight=False)
