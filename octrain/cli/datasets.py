"""`octrain datasets`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from octrain.cli import context
from octrain.cli.context import JsonOption, console
from octrain.cli.render import age, size, table
from octrain.client import Client, Dataset

app = typer.Typer(help="Upload files that jobs train on.", no_args_is_help=True)

DatasetArgument = Annotated[str, typer.Argument(help="The id of the data set.", metavar="DATASET")]


@app.command()
def upload(
    file: Annotated[Path, typer.Argument(help="The file.", exists=True, dir_okay=False)],
    name: Annotated[str | None, typer.Option(help="Its name. Default: the file's.")] = None,
    media: Annotated[
        str | None, typer.Option(help="jsonl, text or parquet. Default: by the suffix.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="What a record is: text, prompt_completion, chat or labelled.")
    ] = "text",
    column: Annotated[
        list[str] | None, typer.Option(help="The column of a role, as text=body; may be repeated.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Whether to wait for the server's check.")
    ] = True,
    json_output: JsonOption = False,
) -> None:
    """Upload a file, or go on with an upload that was cut, and wait for its check."""
    columns = {}
    for text in column or []:
        role, separator, named = text.partition("=")
        if not separator:
            raise typer.BadParameter(f"--column takes role=column, not {text!r}")
        columns[role] = named
    bars = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        context.client() as client,
        Progress(*bars, console=console, disable=json_output or not console.is_terminal) as bar,
    ):
        task = bar.add_task(escape(file.name), total=None)

        def moved(received: int, total: int) -> None:
            bar.update(task, completed=received, total=total)

        dataset = client.datasets.upload(
            file,
            name=name,
            media=media,
            format=format,
            columns=columns,
            progress=moved,
            wait=wait,
        )
    if json_output:
        context.print_json(dataset)
    else:
        rows = "" if dataset.rows is None else f", {dataset.rows} records"
        console.print(f"{dataset.id} {_status(dataset)}{rows}", highlight=False)


@app.command()
def ls(
    status: Annotated[
        str | None, typer.Option(help="Only these: uploading, checking, ready or invalid.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only with this name.")] = None,
    json_output: JsonOption = False,
) -> None:
    """List data sets, the newest first."""
    with context.client() as client:
        found = list(client.datasets.list(status=status, name=name))
    if json_output:
        context.print_json(found)
        return
    if not found:
        console.print("No such data sets." if status or name else "No data sets.")
        return
    rows = table("ID", "NAME", "STATUS", "MEDIA", "FORMAT", ">SIZE", ">RECORDS", ">AGE")
    for one in found:
        rows.add_row(
            one.id,
            escape(one.name),
            _status(one),
            one.media,
            one.format,
            size(one.size),
            "-" if one.rows is None else f"{one.rows:,}",
            age(one.created_at),
        )
    console.print(rows)


@app.command()
def show(dataset: DatasetArgument, json_output: JsonOption = False) -> None:
    """Show one data set, and what its check found."""
    with context.client() as client:
        found = client.datasets.get(dataset)
    if json_output:
        context.print_json(found)
        return
    facts = table("", "")
    facts.show_header = False
    for label, value in {
        "data set": found.id,
        "name": escape(found.name),
        "status": _status(found),
        "holds": f"{found.media}, {found.format}",
        "columns": escape(" ".join(f"{k}={v}" for k, v in found.columns.items())),
        "size": size(found.size),
        "records": "" if found.rows is None else f"{found.rows:,}",
        "sha256": found.sha256,
        "problems": str(found.problem_count or ""),
    }.items():
        if value:
            facts.add_row(f"[bold]{label}[/]", value)
    console.print(facts)
    for problem in found.problems:
        console.print(f"  {escape(str(problem))}", highlight=False)


@app.command()
def rm(
    datasets: Annotated[list[str], typer.Argument(help="Their ids.", metavar="DATASET...")],
    json_output: JsonOption = False,
) -> None:
    """Delete data sets, or give uploads up."""
    with context.client() as client:
        for dataset_id in datasets:
            _remove(client, dataset_id, quiet=json_output)
    if json_output:
        context.print_json({"deleted": datasets})


def _remove(client: Client, dataset_id: str, *, quiet: bool) -> None:
    client.datasets.delete(dataset_id)
    if not quiet:
        console.print(f"{dataset_id} deleted", highlight=False)


def _status(dataset: Dataset) -> str:
    text = dataset.status
    if dataset.status == "uploading" and dataset.size:
        text += f" ({100 * dataset.received // dataset.size}%)"
    colour = {"ready": "green", "invalid": "red"}.get(dataset.status, "yellow")
    return f"[{colour}]{text}[/]"
