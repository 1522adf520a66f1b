"""`octrain artifacts`, `download`"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from octrain.cli import context
from octrain.cli.context import JobArgument, JsonOption, console
from octrain.cli.render import size, table
from octrain.client import Job


def artifacts(
    job: JobArgument,
    download: Annotated[
        str | None,
        typer.Option(help="Fetch this one: an artifact's id, or a kind such as model (newest)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to fetch it into.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """List what a job made, or fetch it (each file is checked by its sha256)."""
    if output is not None and download is None:
        raise typer.BadParameter("--output goes with --download")
    with context.client() as client:
        handle = client.jobs.get(job)
        if download is not None:
            folder = _download(handle, download, output, quiet=json_output)
            if json_output:
                context.print_json({"folder": str(folder.absolute())})
            else:
                console.print(f"{folder}", highlight=False, markup=False)
            return
        found = handle.artifacts()
    if json_output:
        context.print_json(found)
        return
    if not found:
        console.print("Nothing yet.")
        return
    rows = table("ID", "KIND", "NAME", ">STEP", ">FILES", ">SIZE")
    for one in found:
        rows.add_row(
            one.id,
            one.kind + (" (best)" if one.best else ""),
            escape(one.name),
            "-" if one.step is None else str(one.step),
            str(len(one.files)),
            size(sum(file.size for file in one.files)),
        )
    console.print(rows)


def download(
    job: JobArgument,
    which: Annotated[
        str, typer.Argument(help="An artifact's id, or the newest of a kind.", metavar="[WHICH]")
    ] = "model",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The folder (of --archive: the file) to fetch it into."
        ),
    ] = None,
    archive: Annotated[
        bool,
        typer.Option(
            "--archive", help="The model as one tar file; a broken download goes on where it stood."
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Fetch what a job made: its model as a plain Hugging Face folder, or another artifact."""
    if archive and which != "model":
        raise typer.BadParameter("--archive is offered for the model alone")
    with context.client() as client:
        handle = client.jobs.get(job)
        if archive:
            with _bar(job, quiet=json_output) as moved:
                path = handle.download_model(output, on_progress=moved)
        else:
            path = _download(handle, which, output, quiet=json_output)
    if json_output:
        context.print_json({"file" if archive else "folder": str(path.absolute())})
    else:
        console.print(f"{path}", highlight=False, markup=False)


def _download(job: Job, which: str, folder: Path | None, *, quiet: bool) -> Path:
    with _bar(which, quiet=quiet) as moved:
        return job.download(which, folder, on_progress=moved)


@contextmanager
def _bar(title: str, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar in a terminal; what is given moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(escape(title), total=None)

        def moved(path: str, received: int, total: int) -> None:
            bar.update(task, description=escape(path), completed=received, total=total)

        yield moved
