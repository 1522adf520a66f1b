"""`octrain cancel`, `pause`, `resume`, `start`, `edit`, `rm`"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JobArgument, JsonOption, console
from octrain.cli.documents import apply_settings, read_document
from octrain.cli.exits import Exit, exit_of, members_of
from octrain.cli.options import AllowWaitingOption, JobsArgument, SetOption, pairs
from octrain.cli.render import status_text
from octrain.client import Client, Job, JobData, OctrainError, ServerUnreachable


def cancel(
    jobs: Annotated[
        list[str] | None, typer.Argument(help="The ids of jobs.", metavar="[JOB]...")
    ] = None,
    status: Annotated[
        list[str] | None, typer.Option(help="All unfinished jobs of this status; may be repeated.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="All unfinished jobs with this label, as key=value; may be repeated."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="All unfinished jobs of this name.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of your unfinished jobs.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when all have ended.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Cancel jobs; they keep their checkpoints. A job that has ended stays as it is."""
    filtered = any((status, label, name))
    if sum((bool(jobs), filtered, every)) != 1:
        raise typer.BadParameter(
            "Give ids of jobs, or filters (--status, --label, --name), or --all"
        )
    with context.client() as client:
        if jobs:
            _each(client, jobs, lambda job: job.cancel(), json_output, wait=wait)
            return
        results = client.jobs.cancel_many(
            status=status,
            labels=pairs(label, "--label") if label else None,
            name=name,
            every=every,
        )
        if wait:
            for result in results:
                if result.problem is None:
                    client.jobs.get(result.job_id).wait()
    if json_output:
        context.print_json(results)
    else:
        for result in results:
            what = result.problem or result.status or ""
            console.print(f"{result.job_id} {escape(what)}", highlight=False)
        if not results:
            console.print("No such jobs.")
    if any(result.problem is not None for result in results):
        raise typer.Exit(Exit.CONFLICT)


def pause(jobs: JobsArgument, json_output: JsonOption = False) -> None:
    """Checkpoint jobs and free their nodes."""
    with context.client() as client:
        _each(client, jobs, lambda job: job.pause(), json_output)


def resume(jobs: JobsArgument, json_output: JsonOption = False) -> None:
    """Queue paused jobs again; they go on from their newest checkpoints."""
    with context.client() as client:
        _each(client, jobs, lambda job: job.resume(), json_output)


def start(
    jobs: JobsArgument,
    allow_waiting: AllowWaitingOption = False,
    json_output: JsonOption = False,
) -> None:
    """Queue drafts."""
    with context.client() as client:
        _each(client, jobs, lambda job: job.start(allow_waiting=allow_waiting), json_output)


def edit(
    job: JobArgument,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Set a label, as key=value; may be repeated.")
    ] = None,
    unlabel: Annotated[
        list[str] | None, typer.Option(help="Remove the label of this key; may be repeated.")
    ] = None,
    notes: Annotated[
        str | None, typer.Option(help="Notes; - reads them from standard input.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    settings: SetOption = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", help="A merge patch over the spec of a draft; - for stdin."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Change a job's name, labels, notes or priority, and the spec of a draft."""
    labels: dict[str, str | None] = {**pairs(label, "--label")}
    labels |= dict.fromkeys(unlabel or [])
    patch = apply_settings(read_document(file) if file is not None else {}, settings or [])
    changes: dict[str, Any] = {
        "name": name,
        "labels": labels or None,
        "notes": sys.stdin.read() if notes == "-" else notes,
        "priority": priority,
        "spec": patch or None,
    }
    if all(value is None for value in changes.values()):
        raise typer.BadParameter(
            "Say what to change: --name, --label, --unlabel, --notes, --priority, --set or --file"
        )
    with context.client() as client:
        handle = client.jobs.get(job).edit(**changes)
    if json_output:
        context.print_json(handle.data)
    else:
        _print_job(handle.data)


def rm(
    jobs: JobsArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Delete ended jobs and drafts: specs, metrics, logs, artifacts. Their events stay."""
    if not yes:
        if json_output or not sys.stdin.isatty():
            raise typer.BadParameter("--yes is needed where nobody can be asked")
        typer.confirm(f"Delete {len(jobs)} job(s) with all that they made?", abort=True)
    with context.client() as client:
        deleted, failed = [], Exit.OK
        for job_id in jobs:
            try:
                client.jobs.get(job_id).delete()
            except ServerUnreachable:
                raise
            except OctrainError as error:
                failed = _say(job_id, error, json_output)
                continue
            deleted.append(job_id)
            if not json_output:
                console.print(f"{job_id} deleted", highlight=False)
    if json_output:
        context.print_json({"deleted": deleted})
    if failed:
        raise typer.Exit(failed)


def _each(
    client: Client,
    ids: Sequence[str],
    action: Callable[[Job], Job],
    json_output: bool,
    *,
    wait: bool = False,
) -> None:
    """Do it to every job, whatever becomes of the others; the last failure's status."""
    if len(ids) == 1:
        changed = [action(client.jobs.get(ids[0]))]
        failed = Exit.OK
    else:
        changed, failed = [], Exit.OK
        for job_id in ids:
            try:
                changed.append(action(client.jobs.get(job_id)))
            except ServerUnreachable:
                raise
            except OctrainError as error:
                failed = _say(job_id, error, json_output)
    if wait:
        for job in changed:
            job.wait()
    if json_output:
        data = [job.data for job in changed]
        context.print_json(data[0] if len(ids) == 1 else data)
    else:
        for job in changed:
            _print_job(job.data)
    if failed:
        raise typer.Exit(failed)


def _say(job_id: str, error: OctrainError, json_output: bool) -> Exit:
    status = exit_of(error)
    if json_output:
        told = {"job_id": job_id, "detail": error.detail, **members_of(error), "exit": int(status)}
        print(json.dumps({"error": told}), file=sys.stderr)
    else:
        print(f"octrain: {job_id}: {error}", file=sys.stderr)
    return status


def _print_job(job: JobData) -> None:
    console.print(f"{job.id} {status_text(job)}", highlight=False)
