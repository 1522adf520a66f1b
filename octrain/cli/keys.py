"""`octrain keys`"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JsonOption, console
from octrain.cli.options import span
from octrain.cli.render import age, table
from octrain.client import ApiKey, NewApiKey

app = typer.Typer(help="API keys (for administrators).", no_args_is_help=True)

KeyArgument = Annotated[str, typer.Argument(help="The id of the key.", metavar="KEY")]
ExpiresOption = Annotated[
    str | None, typer.Option("--expires-in", help="When it ends, from now, as 12h or 90d.")
]


@app.command()
def ls(
    owner: Annotated[str | None, typer.Option(help="Only of this owner.")] = None,
    revoked: Annotated[bool, typer.Option("--revoked", help="Revoked ones too.")] = False,
    json_output: JsonOption = False,
) -> None:
    """List keys, oldest first."""
    with context.client() as client:
        found = list(client.keys.list(owner=owner, revoked=revoked))
    if json_output:
        context.print_json(found)
        return
    rows = table("ID", "NAME", "OWNER", "SCOPES", ">AGE", "STATE", ">LAST USED")
    for one in found:
        rows.add_row(
            one.id,
            escape(one.name),
            escape(one.owner),
            " ".join(one.scopes) + (f" ({escape(one.node)})" if one.node else ""),
            age(one.created_at),
            _state(one),
            age(one.last_used_at),
        )
    console.print(rows)


@app.command()
def show(
    key: Annotated[
        str | None, typer.Argument(help="The id of a key; without, your own.", metavar="[KEY]")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show one key, or the one that this command uses."""
    with context.client() as client:
        found = client.keys.get(key) if key is not None else client.keys.own()
    _print(found, json_output)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What it is for.")],
    owner: Annotated[str, typer.Option(help="Whose jobs it sees.")],
    scope: Annotated[
        list[str],
        typer.Option(help="jobs:read, jobs:write, admin or node; several by commas, or repeated."),
    ],
    expires_in: ExpiresOption = None,
    node: Annotated[
        str | None, typer.Option(help="The one node of a key of the scope node.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Make a key; it is shown once."""
    expires_at = _end(expires_in)
    scopes = [one.strip() for given in scope for one in given.split(",") if one.strip()]
    with context.client() as client:
        made = client.keys.create(name, owner, scopes, expires_at=expires_at, node=node)
    _print_secret(made, json_output)


@app.command()
def edit(
    key: KeyArgument,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    expires_in: ExpiresOption = None,
    never_expires: Annotated[
        bool, typer.Option("--never-expires", help="Take its end back.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Rename a key, or say when it ends."""
    if name is None and expires_in is None and not never_expires:
        raise typer.BadParameter("Say what to change: --name, --expires-in or --never-expires")
    if expires_in is not None and never_expires:
        raise typer.BadParameter("--never-expires goes without --expires-in")
    expires_at = _end(expires_in)
    with context.client() as client:
        changed = client.keys.edit(
            key, name=name, expires_at=expires_at, never_expires=never_expires
        )
    _print(changed, json_output)


@app.command()
def rotate(
    key: KeyArgument,
    grace: Annotated[
        str | None,
        typer.Option(help="How long the present key still serves, as 0s, 1h or 2d. Default: 1d."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Give a key a new secret; it is shown once."""
    seconds = None if grace is None else int(span(grace, "--grace").total_seconds())
    with context.client() as client:
        _print_secret(client.keys.rotate(key, grace_seconds=seconds), json_output)


@app.command()
def revoke(key: KeyArgument, json_output: JsonOption = False) -> None:
    """Refuse a key from now on."""
    with context.client() as client:
        _print(client.keys.revoke(key), json_output)


def _end(expires_in: str | None) -> datetime | None:
    return None if expires_in is None else datetime.now(UTC) + span(expires_in, "--expires-in")


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return "[red]revoked[/]"
    if key.expires_at is None:
        return "valid"
    if key.expires_at <= datetime.now(UTC):
        return "[red]expired[/]"
    return f"until {key.expires_at:%Y-%m-%d %H:%M}Z"


def _print(key: ApiKey, json_output: bool) -> None:
    if json_output:
        context.print_json(key)
        return
    facts = table("", "")
    facts.show_header = False
    for label, value in {
        "key": key.id,
        "name": escape(key.name),
        "owner": escape(key.owner),
        "scopes": " ".join(key.scopes),
        "node": escape(key.node or ""),
        "state": _state(key),
        "last used": age(key.last_used_at),
    }.items():
        if value:
            facts.add_row(f"[bold]{label}[/]", value)
    console.print(facts)


def _print_secret(key: NewApiKey, json_output: bool) -> None:
    _print(key, json_output)
    if not json_output:
        print(f"{key.key}  (shown once)")
