"""`octrain status`, `usage`, `quotas`, `audit`"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JsonOption, console
from octrain.cli.exits import Exit
from octrain.cli.options import moment
from octrain.cli.render import number, table
from octrain.client import Quotas

quotas = typer.Typer(help="What owners may use (for administrators).", no_args_is_help=True)

OwnerArgument = Annotated[str, typer.Argument(help="The owner.", metavar="OWNER")]


def usage(
    owner: Annotated[
        str | None, typer.Argument(help="Another owner (for administrators).", metavar="[OWNER]")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show what you use, and what you may use."""
    with context.client() as client:
        used = client.usage(owner)
    if json_output:
        context.print_json(used)
        return
    console.print(f"{escape(used.owner)}, the last {used.window_days} days", highlight=False)
    rows = table("", ">USED", ">ALLOWED")
    rows.add_row("queued jobs", number(used.queued), _limit(used.quotas.queued))
    rows.add_row("running jobs", number(used.running), _limit(used.quotas.running))
    rows.add_row("GPU-hours", number(used.gpu_hours), _limit(used.quotas.gpu_hours))
    rows.add_row("CPU-hours", number(used.cpu_hours), "")
    console.print(rows)


@quotas.command()
def ls(json_output: JsonOption = False) -> None:
    """List the default, and owners with quotas of their own."""
    with context.client() as client:
        found = client.quotas()
    if json_output:
        context.print_json(found)
        return
    rows = table("OWNER", ">QUEUED", ">RUNNING", ">GPU-HOURS")
    for name, one in [("(default)", found.default), *((q.owner or "", q) for q in found.items)]:
        rows.add_row(escape(name), *map(_limit, (one.queued, one.running, one.gpu_hours)))
    console.print(rows)


@quotas.command("set")
def set_(
    owner: OwnerArgument,
    queued: Annotated[int | None, typer.Option(min=0, help="Jobs in the queue.")] = None,
    running: Annotated[int | None, typer.Option(min=0, help="Jobs that run at once.")] = None,
    gpu_hours: Annotated[
        float | None, typer.Option(min=0, help="GPU-hours within the window.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Give an owner quotas of their own; what is not named has no limit."""
    with context.client() as client:
        given = client.set_quotas(owner, queued=queued, running=running, gpu_hours=gpu_hours)
    _print(owner, given, json_output)


@quotas.command()
def reset(owner: OwnerArgument, json_output: JsonOption = False) -> None:
    """Give an owner the default again."""
    with context.client() as client:
        _print(owner, client.reset_quotas(owner), json_output)


def status(json_output: JsonOption = False) -> None:
    """Say whether the service can do its work; status 1 when it is not ready. Needs no key."""
    with context.client() as client:
        told = client.readiness()
    if json_output:
        context.print_json(told)
    else:
        console.print(f"{client.url} is {escape(told.status)}", highlight=False)
        rows = table("PART", "STATE")
        for name, state in told.checks.items():
            rows.add_row(escape(name), escape(state))
        console.print(rows)
    if told.status == "not ready":
        raise typer.Exit(Exit.FAILED)


def audit(
    owner: Annotated[str | None, typer.Option(help="Only by keys of this owner.")] = None,
    key: Annotated[str | None, typer.Option(help="Only by the key of this id.")] = None,
    target: Annotated[str | None, typer.Option(help="Only of what has this id or name.")] = None,
    outcome: Annotated[
        str | None, typer.Option(help="Only these: done, refused or failed.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Since then: 6h, 2d, or 2026-01-31T12:00:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Before then.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 50,
    json_output: JsonOption = False,
) -> None:
    """List who changed what, the newest first (for administrators)."""
    after, before = moment(since, "--since"), moment(until, "--until")
    with context.client() as client:
        found = list(
            client.audit(
                owner=owner,
                key_id=key,
                target=target,
                outcome=outcome,
                since=after,
                until=before,
                limit=limit,
            )
        )
    if json_output:
        context.print_json(found)
        return
    rows = table("TIME", "OWNER", "FROM", "WHAT", "TARGET", "OUTCOME")
    for one in found:
        rows.add_row(
            one.time.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
            escape(one.owner),
            escape(one.address or "-"),
            escape(f"{one.method} {one.route}"),
            escape(one.target or "-"),
            f"{one.outcome} ({one.status})",
        )
    console.print(rows if found else "No such entries.")


def _print(owner: str, given: Quotas, json_output: bool) -> None:
    if json_output:
        context.print_json(given)
    else:
        console.print(
            f"{escape(owner)}: queued {_limit(given.queued)}, running {_limit(given.running)}, "
            f"GPU-hours {_limit(given.gpu_hours)}",
            highlight=False,
        )


def _limit(value: float | None) -> str:
    return "no limit" if value is None else number(value)
