"""The benchmarks that are named are there, and so is every row, size and part that a command of
the docs asks one for: its options are held by `test_commands`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_commands import PAGES, REPOSITORY, commands

BENCHMARKS = REPOSITORY / "benchmarks"

# By program and option: the module and the name of what there is to ask for.
NAMES = {
    ("train_peers", "--shape"): ("peers.shapes", "SHAPES"),
    ("train_peers", "--rows"): ("peers.row_names", "ROW_NAMES"),
    ("train_peers", "--at-least"): ("peers.row_names", "ROW_NAMES"),
    ("crossover", "--sizes"): ("peers.shapes", "SHAPES"),
    ("crossover", "--rows"): ("peers.row_names", "ROW_NAMES"),
    ("gemm_crossover", "--kinds"): ("gemm_crossover", "SHAPES"),
    ("gemm_crossover", "--scalings"): ("gemm_crossover", "RECIPES"),
    ("quality", "--shape"): ("quality", "SHAPES"),
    ("quality", "--rows"): ("quality", "ROWS"),
    ("health_cost", "--sizes"): ("health_cost", "SIZES"),
    ("health_cost", "--recipes"): ("health_cost", "RECIPES"),
    ("graphed_step", "--cases"): ("graphed_step", "CASES"),
    ("service_overhead", "--shape"): ("service_overhead", "SHAPES"),
}
# Of a few words, that argparse refuses others than.
CHOICES = {
    ("train_peers", "--precision"): ("bf16", "fp32"),
    ("prefetch", "--format"): ("text", "chat"),
    ("saving", "--device"): ("cpu", "cuda"),
    ("metrics", "--parts"): ("store", "read", "delete", "sparse"),
}
FREE = {("metrics", "--mlflow-python"), ("api", "--mlflow-python"), ("gemm_crossover", "--out")}


@pytest.fixture(scope="module")
def known() -> Iterator[Callable[[str, str], set[str]]]:
    """What an option of a benchmark knows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))

        def names(program: str, option: str) -> set[str]:
            if (program, option) in CHOICES:
                return set(CHOICES[program, option])
            module, name = NAMES[program, option]
            there: Any = getattr(importlib.import_module(module), name)
            return set(there)

        yield names


def test_what_the_docs_ask_for_is_there(known: Callable[[str, str], set[str]]) -> None:
    asked = [(page.name, *one) for page in PAGES for one in asked_for(commands(page.read_text()))]
    assert len({(program, option) for _, program, option, _ in asked}) > 10
    missing = [
        f"{page}: {program}.py {option} {name}"
        for page, program, option, name in asked
        if name not in known(program, option)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("`python benchmarks/train_peers.py --rows fused,fused_haed --steps 3`", "fused_haed"),
        ("`python benchmarks/train_peers.py --at-least fused=1,plain=2*accelerat`", "accelerat"),
        ("`python benchmarks/graphed_step.py --cases 60m:amp,125m:ta --fail`", "125m:ta"),
        ("`python benchmarks/quality.py OUT --rows bf16,bf15_again`", "bf15_again"),
        ("`python benchmarks/metrics.py --parts read dalete`", "dalete"),
    ],
)
def test_a_wrong_name_is_seen(text: str, name: str, known: Callable[[str, str], set[str]]) -> None:
    asked = list(asked_for(commands(text)))
    assert len(asked) > 1
    assert [one for program, option, one in asked if one not in known(program, option)] == [name]


def asked_for(found: Iterator[list[str]]) -> Iterator[tuple[str, str, str]]:
    """Program, option and name of all that the commands of benchmarks ask for by name."""
    for words in found:
        if not (words[0] == "python" and words[1].startswith("benchmarks/")):
            continue
        program, option = Path(words[1]).stem, ""
        for word in words[2:]:
            if word.startswith("--"):
                option = word
            elif option and (program, option) not in FREE:
                for name in re.split(",", word):
                    yield from ((program, option, one) for one in _names(option, name))


def _names(option: str, value: str) -> list[str]:
    if option == "--at-least":
        row, _, wanted = value.partition("=")
        return [row, *re.findall(r"\*(\w+)", wanted)]
    return [] if re.fullmatch(r"[\d.]+", value) else [value]


def test_benchmarks_that_are_named_are_there() -> None:
    sources = [
        path
        for folder in ("fp8core", "api", "worker", "octrain", "benchmarks", "tests/fp8core")
        for path in (REPOSITORY / folder).rglob("*.py")
    ]
    lost = [
        f"{path.relative_to(REPOSITORY)}: {named}"
        for path in (*PAGES, *sources)
        for named in re.findall(r"\bbenchmarks/[\w/]+\.py", path.read_text())
        if not (REPOSITORY / named).is_file()
    ]
    assert lost == []
