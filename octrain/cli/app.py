"""All commands of `octrain`, put together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from octrain.cli import (
    accounts,
    artifacts,
    changes,
    compare,
    context,
    datasets,
    diff,
    importing,
    jobs,
    keys,
    nodes,
    reading,
    recipes,
    server,
    submit,
    watch,
    webhooks,
)
from octrain.cli.exits import MEANINGS

EPILOG = "Exit status: " + "; ".join(f"{int(code)} {text}" for code, text in MEANINGS.items()) + "."

app = typer.Typer(
    name="octrain",
    help="Train models in 8-bit floating point: submit recipes, follow jobs, fetch models.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(version("octrain"))
    except PackageNotFoundError:
        print("unknown: this octrain is on the path, but not installed")
    raise typer.Exit


@app.callback()
def settle(
    url: Annotated[
        str | None,
        typer.Option(
            help="The server. Default: OCTRAIN_API_URL, else this machine's local stack. "
            "The key comes from OCTRAIN_API_KEY, else from the local stack.",
        ),
    ] = None,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and end.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    context.url = url
    context.fit_console()


app.command("up")(server.up)
app.command("migrate")(server.migrate)
app.command("submit")(submit.submit)
app.command("validate")(submit.validate)
app.command("ls")(jobs.ls)
app.command("show")(jobs.show)
app.command("logs")(reading.logs)
app.command("metrics")(reading.metrics)
app.command("events")(reading.events)
app.command("watch")(watch.watch)
app.command("wait")(watch.wait)
app.command("diff")(diff.diff)
app.command("compare")(compare.compare)
app.command("cancel")(changes.cancel)
app.command("pause")(changes.pause)
app.command("resume")(changes.resume)
app.command("start")(changes.start)
app.command("clone")(submit.clone)
app.command("edit")(changes.edit)
app.command("rm")(changes.rm)
app.command("artifacts")(artifacts.artifacts)
app.command("download")(artifacts.download)
app.add_typer(recipes.app, name="recipes")
app.add_typer(datasets.app, name="datasets")
app.add_typer(nodes.app, name="nodes")
app.add_typer(keys.app, name="keys")
app.add_typer(webhooks.app, name="webhooks")
app.command("status")(accounts.status)
app.command("usage")(accounts.usage)
app.add_typer(accounts.quotas, name="quotas")
app.command("audit")(accounts.audit)
app.add_typer(importing.app, name="import")
