"""What benchmarks import from us is there, those that need a GPU to be imported among them; and no
program is without a test."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.programs import BENCHMARKS, REPOSITORY, run

FILES = sorted(BENCHMARKS.rglob("*.py"))
ROOTS = (REPOSITORY, REPOSITORY / "api", REPOSITORY / "worker", BENCHMARKS)
OURS = ("fp8core", "octrain", "octrain_api", "octrain_worker")
WITHOUT_A_GPU = ("te_parity.py",)
SLOWLY_IMPORTED = (
    "attention_losses.py",
    "gradient_parity.py",
    "learning.py",
    "profile_step.py",
    "te_parity_seeds.py",
)
IMPORTED_ON_A_GPU = ("cross_entropies.py", "norms.py", "override_cost.py")
"""They import Triton or Transformer Engine: their names alone are looked at."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(BENCHMARKS)))
def test_imported_names_are_there(file: Path) -> None:
    missing = [told for told, is_there in imports(file.read_text()) if not is_there]
    assert missing == []


def test_a_name_that_is_gone_is_seen() -> None:
    text = """
from fp8core.engines import create, creates
from fp8core.fusion import parts
from fp8core.trainer import run
def later():
    from peers.work import Work, Works
"""
    seen = dict(imports(text))
    assert [told for told, is_there in seen.items() if not is_there] == [
        "fp8core.engines.creates",
        "fp8core.trainer",
        "peers.work.Works",
    ]
    assert len(seen) == 6


def test_every_program_is_tried() -> None:
    programs = {
        str(file.relative_to(BENCHMARKS)) for file in FILES if "__main__" in file.read_text()
    }
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tried = set(re.findall(r'"([\w/]+\.py)"', tests))
    assert programs - tried == set()


@pytest.mark.parametrize(
    "program",
    [*WITHOUT_A_GPU, *(pytest.param(p, marks=pytest.mark.slow) for p in SLOWLY_IMPORTED)],
)
def test_what_only_a_gpu_can_measure_reads_its_arguments(program: str) -> None:
    assert run(program, "--help").said.startswith(f"usage: {program} ")


def imports(text: str) -> Iterator[tuple[str, bool]]:
    """Every module and name of ours that ``text`` imports, and whether it is there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name):
                    yield alias.name, _source(alias.name) is not None
        elif isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            source = _source(node.module)
            if source is None:
                yield node.module, False
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name, alias.name in _names(source) or _source(name) is not None


def _is_ours(module: str) -> bool:
    first = module.partition(".")[0]
    return first in OURS or first == "peers" or (BENCHMARKS / f"{first}.py").is_file()


def _source(module: str) -> Path | None:
    """The file of a module, or of a package; a folder without one."""
    for root in ROOTS:
        path = root.joinpath(*module.split("."))
        for place in (path.with_suffix(".py"), path / "__init__.py"):
            if place.is_file():
                return place
        if path.is_dir() and any(path.glob("*.py")):
            return path
    return None


@functools.cache
def _names(source: Path) -> frozenset[str]:
    """All that a module has at its top, within its conditions too."""
    if source.is_dir():
        return frozenset()
    found: set[str] = set()
    left: list[ast.AST] = list(ast.parse(source.read_text()).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        else:
            left += ast.iter_child_nodes(node)
    return frozenset(found)
