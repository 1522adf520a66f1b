"""A generator takes the OpenAPI document without a warning, and what it makes fits the service."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octrain_api.app import create_app

pytestmark = pytest.mark.slow

# Every warning of the generator, of Python too, ends it.
COMMAND = (
    *(sys.executable, "-W", "error", "-m", "datamodel_code_generator"),
    *("--input-file-type", "openapi", "--output-model-type", "pydantic_v2.BaseModel"),
    *("--openapi-scopes", "schemas", "paths", "parameters", "requestbodies"),
    *("--target-python-version", "3.11", "--formatters", "builtin", "--use-annotated"),
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The document as it is served."""
    return json.loads(json.dumps(create_app().openapi()))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def generated(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """What the generator makes of it, as a module."""
    folder = tmp_path_factory.mktemp("generated")
    source, target = folder / "openapi.json", folder / "generated_models.py"
    source.write_text(json.dumps(document))
    done = subprocess.run(
        [*COMMAND, "--input", str(source), "--output", str(target)],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == ""
    return load(target)


def load(file: Path) -> ModuleType:
    """The module of a file, importable by its name from now on."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def test_every_schema_has_its_class(document: dict[str, Any], generated: ModuleType) -> None:
    for name in document["components"]["schemas"]:
        assert hasattr(generated, name), name
    assert len(document["components"]["schemas"]) > 100


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
def test_every_example_goes_through_its_class(
    document: dict[str, Any], generated: ModuleType
) -> None:
    checked = 0
    for methods in document["paths"].values():
        for operation in methods.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                reference = re.fullmatch(r".*/(\w+)", content["schema"].get("$ref", ""))
                for example in content.get("examples", {}).values() if reference else ():
                    made = getattr(generated, reference[1]).model_validate(example["value"])  # type: ignore[index]
                    again = made.model_dump(mode="json", exclude_unset=True, by_alias=True)
                    assert again == example["value"], operation["operationId"]
                    checked += 1
    assert checked > 15
