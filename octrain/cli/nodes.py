"""`octrain nodes`"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JsonOption, console
from octrain.cli.options import span
from octrain.cli.render import size, sparkline, table
from octrain.client import Client, EnrolmentToken, Node, NotFound

app = typer.Typer(help="The machines that run jobs.", invoke_without_command=True)

NodeArgument = Annotated[str, typer.Argument(help="The node's name or id.", metavar="NODE")]


@app.callback()
def nodes(call: typer.Context, json_output: JsonOption = False) -> None:
    """List the machines that run jobs, and which precision engines work on them."""
    if call.invoked_subcommand is None:
        ls(json_output)
    elif json_output:
        raise typer.BadParameter("--json stands behind the command")


@app.command()
def ls(json_output: JsonOption = False) -> None:
    """List the machines that run jobs, and which precision engines work on them."""
    with context.client() as client:
        found = client.nodes()
    if json_output:
        context.print_json(found)
        return
    if not found:
        console.print("No node has registered yet.")
        return
    rows = table("NAME", "STATE", "HOST", ">CPU SLOTS", "GPUS", "ENGINES")
    for node in found:
        gpus = [f"{g.get('name')} {size(g.get('memory_bytes'))}" for g in node.gpus]
        engines = [name for name in sorted(node.engines) if node.engine_works(name)]
        rows.add_row(
            escape(node.name),
            _state(node),
            escape(node.hostname or "-"),
            f"{node.cpu_slots_used}/{node.cpu_slots}",
            escape(", ".join(gpus) or "-"),
            ", ".join(engines) or "-",
        )
    console.print(rows)


@app.command()
def metrics(
    node: NodeArgument,
    last: Annotated[str, typer.Option(help="How far back, as 30m, 6h or 2d.")] = "1h",
    json_output: JsonOption = False,
) -> None:
    """Show what a node's processors and GPUs do."""
    seconds = span(last, "--last").total_seconds()
    with context.client() as client:
        samples = client.node_metrics(_id(client, node), seconds=seconds)
    if json_output:
        context.print_json(samples)
        return
    if not samples:
        console.print("No samples of that time.")
        return
    rows = table("DEVICE", ">BUSY", ">MEMORY", ">WATTS", ">CELSIUS", "CURVE")
    host = samples[-1].host
    busy = [sample.host.get("cpu_utilization") for sample in samples]
    rows.add_row(
        "host",
        _share(host.get("cpu_utilization")),
        _size(host.get("memory_bytes")),
        "-",
        "-",
        sparkline([value for value in busy if value is not None]),
    )
    for gpu in samples[-1].gpus:
        index = gpu.get("index")
        curve = [g for sample in samples for g in sample.gpus if g.get("index") == index]
        rows.add_row(
            f"GPU {index}",
            _share(gpu.get("utilization")),
            _size(gpu.get("memory_bytes")),
            _whole(gpu.get("power_watts")),
            _whole(gpu.get("temperature_celsius")),
            sparkline([g["utilization"] for g in curve if g.get("utilization") is not None]),
        )
    console.print(rows)


@app.command()
def drain(
    node: NodeArgument,
    release: Annotated[
        bool, typer.Option("--release", help="Send its jobs back to the queue; they save first.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Give a node no more jobs (for administrators)."""
    with context.client() as client:
        _print(client.drain_node(_id(client, node), release=release), json_output)


@app.command()
def undrain(node: NodeArgument, json_output: JsonOption = False) -> None:
    """Give a node jobs again (for administrators)."""
    with context.client() as client:
        _print(client.undrain_node(_id(client, node)), json_output)


@app.command()
def release(node: NodeArgument, json_output: JsonOption = False) -> None:
    """Give jobs again to a node that was set aside for repeated faults (for administrators)."""
    with context.client() as client:
        _print(client.release_node(_id(client, node)), json_output)


@app.command()
def token(
    node: Annotated[
        str | None, typer.Option(help="The only node that may enrol with it. Default: any new one.")
    ] = None,
    owner: Annotated[str | None, typer.Option(help="Of the node's key. Default: you.")] = None,
    expires_in: Annotated[
        str | None, typer.Option("--expires-in", help="As 30m or 2d. Default: 1h.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Make a one-time token with which a machine gets its node's key (for administrators)."""
    seconds = None if expires_in is None else int(span(expires_in, "--expires-in").total_seconds())
    with context.client() as client:
        made = client.create_enrolment_token(node=node, owner=owner, expires_in_seconds=seconds)
    if json_output:
        context.print_json(made)
    else:
        print(f"{made.token}  (shown once)")


@app.command()
def tokens(json_output: JsonOption = False) -> None:
    """List enrolment tokens and what became of them (for administrators)."""
    with context.client() as client:
        found = client.enrolment_tokens()
    if json_output:
        context.print_json(found)
        return
    rows = table("ID", "OWNER", "NODE", "STATE", "KEY")
    for one in found:
        rows.add_row(
            one.id,
            escape(one.owner),
            escape(one.node or "any"),
            _token_state(one),
            one.key_id or "-",
        )
    console.print(rows if found else "No enrolment tokens.")


@app.command("revoke-token")
def revoke_token(
    token: Annotated[str, typer.Argument(help="The id of the token.", metavar="TOKEN")],
    json_output: JsonOption = False,
) -> None:
    """End a token that no machine has used (for administrators)."""
    with context.client() as client:
        ended = client.revoke_enrolment_token(token)
    if json_output:
        context.print_json(ended)
    else:
        console.print(f"{ended.id} revoked", highlight=False)


def _token_state(one: EnrolmentToken) -> str:
    if one.used_at is not None:
        return "used"
    if one.expires_at is not None and one.expires_at <= datetime.now(UTC):
        return "ended"
    return "open"


def _id(client: Client, named: str) -> str:
    """The id of a node that is given by its name or its id. Errors: NotFound."""
    for node in client.nodes():
        if named in (node.id, node.name):
            return node.id
    raise NotFound(f"There is no node {named!r}; see octrain nodes.", status=404)


def _state(node: Node) -> str:
    if node.quarantined_since is not None:
        return f"set aside: {escape(node.quarantine_detail or 'repeated faults')}"
    if not node.live:
        return "unreachable"
    return "draining" if node.wanted == "drain" else "live"


def _print(node: Node, json_output: bool) -> None:
    if json_output:
        context.print_json(node)
    else:
        console.print(f"{escape(node.name)} {_state(node)}", highlight=False)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _size(value: float | None) -> str:
    return size(None if value is None else int(value))


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
