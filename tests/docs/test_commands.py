"""The commands, files and options that the README and the docs name are there."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from octrain.cli.app import app

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

SOURCES = {
    "fp8core": "fp8core/commands/cli.py",
    "octrain_api": "api/octrain_api/__main__.py",
    "octrain_worker": "worker/octrain_worker/__main__.py",
    "octrain.demo": "octrain/demo.py",
    "fp8core.spec.reference": "fp8core/spec/reference.py",
    "tests.chaos": "tests/chaos/__main__.py",
    "tests.dashboard.measure": "tests/dashboard/measure.py",
    "tests.dashboard.screenshots": "tests/dashboard/screenshots.py",
}
"""Where the modules that are started as programs read their command lines."""
_BEFORE = r"^(nice -n \S+ |[A-Z_]+=\S+ )+"
"""What may stand before a command: its priority and its environment."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_taken(page: Path) -> None:
    refused = {}
    for words in commands(page.read_text()):
        if (reason := refusal(words)) is not None:
            refused[" ".join(words)] = reason
    assert refused == {}


def test_the_docs_are_read() -> None:
    told = [words for page in PAGES for words in commands(page.read_text())]
    assert len(told) > 100
    assert {words[0] for words in told} == {"octrain", "python"}
    assert len({words[1] for words in told if words[0] == "octrain"}) > 20
    modules = {words[2] for words in told if words[1] == "-m"}
    assert modules == SOURCES.keys()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("`octrain submit job.json --wait`", None),
        ("`octrain submti job.json`", "no command submti"),
        ("`octrain ls --staus running`", "no option --staus"),
        ("    octrain wait JOB; octrain watch JOB --tal", "no option --tal"),
        (
            "    python benchmarks/api.py --rounds 3 \\\n        --secs=4  # four",
            "no option --secs",
        ),
        ("    python benchmarks/apis.py", "no file"),
        ("One run (`nice -n -12 python\nbenchmarks/api.py --rouds 3`):", "no option --rouds"),
        (
            "`TOKENIZERS_PARALLELISM=false python benchmarks/prefetch.py --turn 0`",
            "no option --turn",
        ),
        ("`.venv/bin/python -m fp8core train spec.json --workdir run`", None),
        ("`python -m fp8core trian spec.json`", "no command trian"),
        ("`python -m tests.chaos --sed 1`", "no option --sed"),
        ("`python -m octrain.dmo`", "no module"),
    ],
)
def test_a_wrong_command_is_seen(text: str, reason: str | None) -> None:
    refused = [found for words in commands(text) if (found := refusal(words)) is not None]
    assert len(refused) == (0 if reason is None else 1)
    assert reason is None or reason in refused[0]


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command of ours that stands in code, continued lines joined."""
    for code in _code(re.sub(r"\\\n\s*", " ", text)):
        for part in re.split(r"[;|<>]|&&", re.sub(r"\s#\s.*$", "", code)):
            command = re.sub(_BEFORE, "", part.strip()).removeprefix(".venv/bin/")
            if "…" not in command and re.match(
                r"octrain [a-z]|python (-m (?!pytest )|benchmarks/)", command
            ):
                yield shlex.split(command)


def _code(text: str) -> Iterator[str]:
    """Spans of code, which prose may break where a line ends, and lines of blocks of code."""
    for block in re.split(r"(?:\n[ \t]*){2,}|^```.*$", text, flags=re.MULTILINE):
        if "`" in block:
            yield from re.findall(r"`([^`]+)`", " ".join(block.split()))
        else:
            yield from block.splitlines()


def refusal(words: list[str]) -> str | None:
    """What of the command there is not; None where all is there."""
    if words[0] == "octrain":
        return _refusal_of_octrain(words[1:])
    if words[1] == "-m":
        if words[2] not in SOURCES:
            return f"no module {words[2]}"
        return _refusal_by_source(SOURCES[words[2]], words[3:])
    return _refusal_by_source(words[1], words[2:], subcommands=False)


@functools.cache
def _octrain() -> object:
    return typer.main.get_command(app)


def _refusal_of_octrain(words: list[str]) -> str | None:
    command: Any = _octrain()
    context = command.make_context("octrain", [], resilient_parsing=True)
    while isinstance(command, TyperGroup):
        found = command.get_command(context, words[0]) if words else None
        if found is None:
            return f"no command {' '.join(words[:1])}"
        command, words = found, words[1:]
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    for option in (word.partition("=")[0] for word in words if re.match("--?[a-z]", word)):
        if option not in {*options, "--help"}:
            return f"no option {option}"
    return None


def _refusal_by_source(path: str, words: list[str], *, subcommands: bool = True) -> str | None:
    """By what the source reads: starting it costs seconds, and some need packages of a GPU."""
    if not (REPOSITORY / path).is_file():
        return f"no file {path}"
    source = (REPOSITORY / path).read_text()
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and f'"{option}"' not in source:
            return f"no option {option}"
    first = words[0] if words else "-"
    if subcommands and "add_subparsers" in source and f'"{first}"' not in source and first != "-":
        return f"no command {first}"
    return None
