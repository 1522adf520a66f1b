"""`octrain webhooks`"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JsonOption, console
from octrain.cli.options import moment, pairs, span
from octrain.cli.render import age, table
from octrain.client import Delivery, NewWebhook, Webhook

app = typer.Typer(help="Endpoints that are told of your jobs.", no_args_is_help=True)

WebhookArgument = Annotated[str, typer.Argument(help="The id of the webhook.", metavar="WEBHOOK")]
EventOption = Annotated[
    list[str] | None,
    typer.Option("--event", help="Only these, as job.succeeded or job.*; may be repeated."),
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", help="Only of jobs with this label, as key=value; may be repeated."),
]


@app.command()
def ls(json_output: JsonOption = False) -> None:
    """List webhooks, the newest first."""
    with context.client() as client:
        found = list(client.webhooks.list())
    if json_output:
        context.print_json(found)
        return
    if not found:
        console.print("No webhooks.")
        return
    rows = table("ID", "URL", "EVENTS", "STATE", ">LAST SUCCESS")
    for one in found:
        events = escape(" ".join(one.events))
        rows.add_row(one.id, escape(one.url), events, _state(one), age(one.last_success_at))
    console.print(rows)


@app.command()
def create(
    url: Annotated[str, typer.Argument(help="Where to send events.")],
    event: EventOption = None,
    label: LabelOption = None,
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    json_output: JsonOption = False,
) -> None:
    """Send events of your jobs to a URL; the secret that verifies them is shown once."""
    labels = pairs(label, "--label") if label else None
    with context.client() as client:
        made = client.webhooks.create(url, events=event, labels=labels, description=description)
    _print_secret(made, json_output)


@app.command()
def show(webhook: WebhookArgument, json_output: JsonOption = False) -> None:
    """Show one webhook, and how it is doing."""
    with context.client() as client:
        _print(client.webhooks.get(webhook), json_output)


@app.command()
def edit(
    webhook: WebhookArgument,
    url: Annotated[str | None, typer.Option(help="A new URL.")] = None,
    event: EventOption = None,
    label: LabelOption = None,
    description: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    active: Annotated[
        bool | None,
        typer.Option("--enable/--disable", help="Send, or not; also after the service stopped."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Change what is sent, or switch a webhook off and on."""
    if all(value is None for value in (url, event, label, description, active)):
        raise typer.BadParameter(
            "Say what to change: --url, --event, --label, --description, --enable or --disable"
        )
    labels = pairs(label, "--label") if label else None
    with context.client() as client:
        changed = client.webhooks.edit(
            webhook, url=url, description=description, events=event, labels=labels, active=active
        )
    _print(changed, json_output)


@app.command()
def rm(webhook: WebhookArgument, json_output: JsonOption = False) -> None:
    """Delete a webhook and its delivery log."""
    with context.client() as client:
        client.webhooks.delete(webhook)
    if json_output:
        context.print_json({"deleted": webhook})
    else:
        console.print(f"{webhook} deleted", highlight=False)


@app.command()
def rotate(
    webhook: WebhookArgument,
    keep: Annotated[
        str | None,
        typer.Option(help="How long the former secret signs as well, as 0s or 2d. Default: 1d."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Make a new secret; it is shown once."""
    seconds = None if keep is None else int(span(keep, "--keep").total_seconds())
    with context.client() as client:
        _print_secret(client.webhooks.rotate(webhook, keep_seconds=seconds), json_output)


@app.command("test")
def call(webhook: WebhookArgument, json_output: JsonOption = False) -> None:
    """Send a test call; see what came of it with deliveries."""
    with context.client() as client:
        _print_deliveries([client.webhooks.test(webhook)], json_output, one=True)


@app.command()
def deliveries(
    webhook: WebhookArgument,
    delivery: Annotated[
        str | None, typer.Argument(help="Only this one, with each try.", metavar="[DELIVERY]")
    ] = None,
    status: Annotated[
        str | None, typer.Option(help="Only these: pending, delivered or failed.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 20,
    json_output: JsonOption = False,
) -> None:
    """List what was sent, the newest first; or show one delivery and each of its tries."""
    if delivery is not None:
        if status is not None:
            raise typer.BadParameter("--status goes without the id of a delivery")
        with context.client() as client:
            one = client.webhooks.delivery(webhook, delivery)
        _print_deliveries([one], json_output, one=True)
        if not json_output:
            _print_tries(one)
        return
    with context.client() as client:
        found = list(client.webhooks.deliveries(webhook, status=status, limit=limit))
    _print_deliveries(found, json_output)


@app.command()
def redeliver(
    webhook: WebhookArgument,
    delivery: Annotated[
        str | None, typer.Argument(help="The id of a delivery.", metavar="[DELIVERY]")
    ] = None,
    failed_since: Annotated[
        str | None,
        typer.Option(help="Instead: all that failed since then, as 6h or 2026-01-31T12:00:00Z."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Send a message again, or all that failed."""
    since = moment(failed_since, "--failed-since")
    if (delivery is None) == (since is None):
        raise typer.BadParameter("Give the id of a delivery, or --failed-since")
    with context.client() as client:
        if delivery is not None:
            again = client.webhooks.redeliver(webhook, delivery)
            _print_deliveries([again], json_output, one=True)
            return
        assert since is not None
        count = client.webhooks.redeliver_failed(webhook, since)
    if json_output:
        context.print_json({"count": count})
    else:
        console.print(f"{count} sent again", highlight=False)


def _state(webhook: Webhook) -> str:
    if webhook.disabled_at is not None:
        return f"[red]disabled[/] ({escape(webhook.disabled_reason or 'it failed')})"
    if not webhook.active:
        return "off"
    return f"[yellow]failing ({webhook.failures})[/]" if webhook.failing_since else "active"


def _print(webhook: Webhook, json_output: bool) -> None:
    if json_output:
        context.print_json(webhook)
        return
    facts = table("", "")
    facts.show_header = False
    for label, value in {
        "webhook": webhook.id,
        "url": escape(webhook.url),
        "description": escape(webhook.description),
        "events": escape(" ".join(webhook.events)),
        "labels": escape(" ".join(f"{k}={v}" for k, v in webhook.labels.items())),
        "state": _state(webhook),
        "last success": age(webhook.last_success_at),
    }.items():
        if value:
            facts.add_row(f"[bold]{label}[/]", value)
    console.print(facts)


def _print_secret(webhook: NewWebhook, json_output: bool) -> None:
    _print(webhook, json_output)
    if not json_output:
        print(f"{webhook.secret}  (shown once)")


def _print_tries(delivery: Delivery) -> None:
    rows = table("TIME", ">STATUS", ">MILLISECONDS", "WHAT CAME BACK")
    for one in delivery.attempts:
        back = one.get("error") or one.get("response_excerpt") or ""
        rows.add_row(
            escape(str(one.get("started_at") or "-")),
            str(one.get("status_code") or "-"),
            str(one.get("duration_ms", "-")),
            escape(str(back)[:200]),
        )
    if delivery.attempts:
        console.print(rows)


def _print_deliveries(found: list[Delivery], json_output: bool, *, one: bool = False) -> None:
    if json_output:
        context.print_json(found[0] if one else found)
        return
    if not found:
        console.print("Nothing was sent.")
        return
    rows = table("ID", "TYPE", "JOB", "STATUS", ">TRIES", ">AGE", "DETAIL")
    for delivery in found:
        last = delivery.attempts[-1] if delivery.attempts else {}
        detail = delivery.detail or last.get("error") or last.get("status_code") or ""
        rows.add_row(
            delivery.id,
            delivery.type,
            delivery.job_id or "-",
            delivery.status,
            str(delivery.attempt_count),
            age(delivery.created_at),
            escape(str(detail)),
        )
    console.print(rows)
