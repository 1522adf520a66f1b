"""`octrain ls`, `show`"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JobArgument, JsonOption, console
from octrain.cli.options import moment, pairs
from octrain.cli.precision import precision_table
from octrain.cli.render import age, duration, number, progress_text, status_text, table
from octrain.client import JobData, JobFilters, JobPart, OctrainError


def ls(
    status: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only with this label, as key=value; may be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only with this name.")] = None,
    query: Annotated[
        str | None, typer.Option("--query", "-q", help="Part of the name, or a whole id.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Submitted since then: 6h, 2d, or 2026-01-31T12:00:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Submitted before then.")] = None,
    ended_since: Annotated[str | None, typer.Option(help="Ended since then.")] = None,
    ended_until: Annotated[str | None, typer.Option(help="Ended before then.")] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            help="created_at, ended_at, name, priority or status; a minus before it for "
            "descending, as --sort=-priority."
        ),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(help="Only these members, as name,status,progress: the columns, or the JSON."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 20,
    json_output: JsonOption = False,
) -> None:
    """List jobs, the newest first."""
    filters: JobFilters = {
        "status": status,
        "name": name,
        "q": query,
        "labels": pairs(label, "--label"),
        "created_after": moment(since, "--since"),
        "created_before": moment(until, "--until"),
        "ended_after": moment(ended_since, "--ended-since"),
        "ended_before": moment(ended_until, "--ended-until"),
        "sort": sort,
    }
    with context.client() as client:
        if fields is not None:
            wanted = [part.strip() for part in fields.split(",") if part.strip()]
            _print_parts(
                list(client.jobs.select(*wanted, limit=limit, **filters)), wanted, json_output
            )
            return
        found = [job.data for job in client.jobs.list(limit=limit, **filters)]
    if json_output:
        context.print_json(found)
        return
    if not found:
        narrowed = any((status, label, name, query, since, until, ended_since, ended_until))
        console.print("No such jobs." if narrowed else "No jobs.")
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


def _print_parts(found: list[JobPart], fields: list[str], json_output: bool) -> None:
    """What was asked for, and no more: a member that is null is told as null."""
    given = [
        context.as_json(part.model_dump(mode="json", include=part.model_fields_set))
        for part in found
    ]
    if json_output:
        context.print_json(given)
        return
    columns = ["id", *(name for name in fields if name != "id")]
    rows = table(*(name.upper() for name in columns))
    for part in given:
        rows.add_row(*(escape(_cell(part.get(name))) for name in columns))
    console.print(rows if given else "No such jobs.")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def show(
    job: JobArgument,
    conversion: Annotated[
        bool, typer.Option("--conversion", help="Also each layer: converted, or why not.")
    ] = False,
    precision: Annotated[
        bool, typer.Option("--precision", help="Also the formats and bytes that were measured.")
    ] = False,
    spec: Annotated[
        bool, typer.Option("--spec", help="Only the spec, as JSON that submit takes.")
    ] = False,
    given: Annotated[
        bool, typer.Option("--given", help="Only what was written of the spec, as JSON.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Show one job: state, attempts, newest metrics, what was converted."""
    with context.client() as client:
        handle = client.jobs.get(job)
        rows = handle.conversion() if conversion else []
        measured = handle.precision() if precision else {}
    if spec:
        context.print_json(handle.data.spec)
        return
    if given:
        if handle.data.spec_given is None:
            raise OctrainError(f"what was written of the spec of {job} is not known; see --spec")
        context.print_json(handle.data.spec_given)
        return
    if json_output:
        shown = context.as_json(handle.data)
        shown |= {"conversion": rows} if conversion else {}
        shown |= {"precision": measured} if precision else {}
        context.print_json(shown)
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
    if precision:
        console.print(precision_table(measured))


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
        "notes": escape(job.notes),
        "priority": str(job.priority or ""),
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
