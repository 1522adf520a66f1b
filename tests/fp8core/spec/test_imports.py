"""Importing the spec is cheap, and each name is where it is said to be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fp8core.spec

HEAVY = ("torch", "numpy", "transformers", "datasets", "pyarrow", "fastapi", "sqlalchemy", "httpx")


def test_the_spec_imports_nothing_heavy_and_nothing_else_of_ours() -> None:
    program = """
import sys
from fp8core.spec import JobSpec, json_schema, parse_spec
model = {"source": "path", "path": "a"}
parse_spec({"model": model, "data": {"source": "builtin"}, "recipe": {}})
json_schema()
print("\\n".join(sys.modules))
"""
    root = Path(fp8core.spec.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    modules = done.stdout.split()
    assert "fp8core.spec.job" in modules
    assert not [name for name in modules if name.split(".")[0] in HEAVY]
    assert not [
        name
        for name in modules
        if name.startswith(("fp8core.", "octrain")) and not name.startswith("fp8core.spec")
    ]


def test_outcomes_do_not_even_need_pydantic() -> None:
    program = "import sys; from fp8core.spec import Reason; print('pydantic' in sys.modules)"
    root = Path(fp8core.spec.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_every_public_name_loads_and_is_known_to_type_checkers() -> None:
    source = ast.parse(Path(fp8core.spec.__file__).read_text())
    typed = {
        alias.asname
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp8core.spec.")
        for alias in node.names
    }
    assert typed == set(fp8core.spec.__all__)
    for name in fp8core.spec.__all__:
        assert getattr(fp8core.spec, name) is not None
    assert set(fp8core.spec.__all__) <= set(dir(fp8core.spec))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="xyzzy"):
        _ = fp8core.spec.xyzzy
