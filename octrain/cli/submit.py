"""`octrain submit`, `validate`, `clone`"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JobArgument, JsonOption, console
from octrain.cli.documents import apply_settings, read_document
from octrain.cli.exits import Exit
from octrain.cli.options import AllowWaitingOption, FileOption, SetOption, pairs
from octrain.cli.render import duration, number, size, table
from octrain.cli.watch import JobBars
from octrain.client import Job, ValidationReport

SpecArgument = Annotated[
    str | None,
    typer.Argument(help="The spec: a YAML or JSON file, or - for standard input.", metavar="SPEC"),
]
DraftOption = Annotated[
    bool, typer.Option("--draft", help="Store it without queueing it; octrain start does that.")
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Follow it to its end; status 6 unless it succeeds.")
]


def submit(
    spec: SpecArgument = None,
    file: FileOption = None,
    settings: SetOption = None,
    draft: DraftOption = False,
    allow_waiting: AllowWaitingOption = False,
    wait: WaitOption = False,
    label: Annotated[
        list[str] | None, typer.Option(help="Set a label, as key=value; may be repeated.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Submitting twice with one key makes one job.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Submit a job."""
    content = _spec(spec, file, settings)
    labels = content.get("labels") or {}
    # Labels of another kind are the service's to refuse.
    if label and isinstance(labels, dict):
        content = {**content, "labels": {**labels, **pairs(label, "--label")}}
    _refuse_waiting_for_drafts(draft, wait)
    with context.client() as client:
        job = client.jobs.create(
            content, idempotency_key=idempotency_key, draft=draft, allow_waiting=allow_waiting
        )
        follow_made(job, wait=wait, json_output=json_output)


def clone(
    job: JobArgument,
    settings: SetOption = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            help="A merge patch (RFC 7396) over the spec, YAML or JSON; - for stdin.",
        ),
    ] = None,
    draft: DraftOption = False,
    allow_waiting: AllowWaitingOption = False,
    wait: WaitOption = False,
    json_output: JsonOption = False,
) -> None:
    """Submit a job's spec again, with changes; a value of null brings a default back."""
    overrides = apply_settings(read_document(file) if file is not None else {}, settings or [])
    _refuse_waiting_for_drafts(draft, wait)
    with context.client() as client:
        made = client.jobs.get(job).clone(overrides, draft=draft, allow_waiting=allow_waiting)
        follow_made(made, wait=wait, json_output=json_output)


def validate(
    spec: SpecArgument = None,
    file: FileOption = None,
    settings: SetOption = None,
    wait: Annotated[
        float, typer.Option(min=0, max=60, help="Seconds to wait for a node's plan.")
    ] = 15,
    json_output: JsonOption = False,
) -> None:
    """Say what a job would come to, without submitting it; status 2 if it is not valid."""
    content = _spec(spec, file, settings)
    with context.client() as client:
        report = client.jobs.validate(content, wait=wait)
    if json_output:
        context.print_json(report)
    else:
        _print_report(report)
    if not report.valid:
        raise typer.Exit(Exit.USAGE)


def follow_made(job: Job, *, wait: bool, json_output: bool) -> None:
    """Print a job that was made, and follow it if wanted; status 6 unless it succeeds then."""
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
        raise typer.Exit(Exit.JOB_NOT_SUCCEEDED)


def _spec(argument: str | None, file: str | None, settings: list[str] | None) -> dict[str, Any]:
    if argument is not None and file is not None:
        raise typer.BadParameter("Give the spec once: as SPEC or with --file")
    source = argument if argument is not None else file
    if source is None:
        raise typer.BadParameter("Give a spec: a YAML or JSON file, or - for standard input")
    return apply_settings(read_document(source), settings or [])


def _refuse_waiting_for_drafts(draft: bool, wait: bool) -> None:
    if draft and wait:
        raise typer.BadParameter("--wait: a draft does not run until octrain start")


def _print_report(report: ValidationReport) -> None:
    console.print("[green]valid[/]" if report.valid else "[red]not valid[/]")
    for problem in report.errors:
        console.print(f"  {escape(str(problem))}", highlight=False)
    for warning in report.warnings:
        where = f"{warning.pointer}: " if warning.pointer else ""
        console.print(f"  [yellow]warning[/] {escape(where + warning.message)}", highlight=False)
    if report.nodes:
        rows = table("NODE", "FITS", "NOW", "REASON")
        for node in report.nodes:
            now = "free" if node.free else "busy" if node.is_live else "unreachable"
            fits = "yes" if node.fits else "no"
            rows.add_row(escape(node.node), fits, now, escape(node.reason or ""))
        console.print(rows)
    if report.plan is not None:
        for name, value in report.plan.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                shown = size(int(value)) if name.endswith("bytes") else number(value)
                console.print(f"  {escape(name.replace('_', ' '))}: {shown}", highlight=False)
        for quoted in report.plan.get("measured") or ():
            console.print(f"  {escape(quoted['says'])}", highlight=False)
    elif report.plan_status:
        detail = f": {report.plan_detail}" if report.plan_detail else ""
        console.print(f"no plan ({escape(report.plan_status + detail)})", highlight=False)
    if report.time is not None:
        like = len(report.time.from_jobs)
        console.print(
            f"about {duration(report.time.seconds)} at {number(report.time.tokens_per_second)} "
            f"tokens/s, {'a job' if like == 1 else f'the median of {like} jobs'} like this one",
            highlight=False,
        )
