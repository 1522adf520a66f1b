"""`octrain recipes`"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JsonOption, console
from octrain.cli.documents import apply_settings, read_document
from octrain.cli.options import FileOption, SetOption
from octrain.cli.render import age, table
from octrain.client import Recipe

app = typer.Typer(help="Named recipes: the service's presets and your own.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="The recipe's name.", metavar="NAME")]


@app.command()
def ls(json_output: JsonOption = False) -> None:
    """List presets, then your own recipes."""
    with context.client() as client:
        found = list(client.recipes.list())
    if json_output:
        context.print_json(found)
        return
    rows = table("NAME", ">VERSION", "OF", "WHAT")
    for one in found:
        what = one.title or one.description or _summary(one)
        rows.add_row(escape(one.name), str(one.version), _origin(one), escape(what))
    console.print(rows)


@app.command()
def show(
    name: NameArgument,
    version: Annotated[int | None, typer.Option(min=1, help="Default: the newest.")] = None,
    versions: Annotated[bool, typer.Option("--versions", help="List all its versions.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Show a recipe and its reasons."""
    if versions and version is not None:
        raise typer.BadParameter("--versions goes without --version")
    with context.client() as client:
        found = client.recipes.versions(name) if versions else [client.recipes.get(name, version)]
    if json_output:
        context.print_json(found if versions else found[0])
        return
    if versions:
        rows = table(">VERSION", ">AGE", "WHAT")
        for one in found:
            rows.add_row(str(one.version), age(one.created_at), escape(_summary(one)))
        console.print(rows)
        return
    (one,) = found
    console.print(f"[bold]{escape(one.name)}[/], version {one.version}, {_origin(one)}")
    for text in (one.title, one.description, one.needs and f"Needs: {one.needs}"):
        if text:
            console.print(text, markup=False, highlight=False)
    print(json.dumps(one.fragment, indent=2, ensure_ascii=False))


@app.command()
def save(
    name: NameArgument,
    file: FileOption = None,
    settings: SetOption = None,
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    json_output: JsonOption = False,
) -> None:
    """Store a recipe, or the next version of one, of parts of a spec: recipe, conversion, ..."""
    if file is None and not settings:
        raise typer.BadParameter("Give the parts of a spec with --file or --set")
    fragment = apply_settings(read_document(file) if file is not None else {}, settings or [])
    with context.client() as client:
        saved = client.recipes.save(name, fragment, description)
    if json_output:
        context.print_json(saved)
    else:
        console.print(f"{escape(saved.name)}, version {saved.version}", highlight=False)


@app.command()
def rm(name: NameArgument, json_output: JsonOption = False) -> None:
    """List a recipe no more; specs that name it stay valid."""
    with context.client() as client:
        client.recipes.withdraw(name)
    if json_output:
        context.print_json({"withdrawn": name})
    else:
        console.print(f"{escape(name)} withdrawn", highlight=False)


def _origin(recipe: Recipe) -> str:
    return "the service" if recipe.preset else escape(recipe.owner or "you")


def _summary(recipe: Recipe) -> str:
    settings = recipe.fragment.get("recipe", {})
    if not isinstance(settings, dict):
        return ""
    return " ".join(f"{key}={value}" for key, value in settings.items())
