"""All commands of `octrain`, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from octrain.cli import artifacts, context, datasets, jobs, server, submit

EPILOG = (
    "Exit status: 0 success; 1 the local stack failed; 2 wrong usage; 3 no server answers; "
    "4 the server refused; 5 the job waited for did not succeed; 130 interrupted."
)

app = typer.Typer(
    name="octrain",
    help="Train models in 8-bit floating point: submit recipes, follow jobs, fetch models.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def settle(
    url: Annotated[
        str | None,
        typer.Option(
            help="The server. Default: OCTRAIN_API_URL, else this machine's local stack. "
            "The key comes from OCTRAIN_API_KEY, else from the local stack.",
        ),
    ] = None,
) -> None:
    context.url = url


app.command("up")(server.up)
app.command("migrate")(server.migrate)
app.command("nodes")(server.nodes)
app.command("submit")(submit.submit)
app.command("ls")(jobs.ls)
app.command("show")(jobs.show)
app.command("logs")(jobs.logs)
app.command("metrics")(jobs.metrics)
app.command("cancel")(jobs.cancel)
app.command("artifacts")(artifacts.artifacts)
app.add_typer(datasets.app, name="datasets")
