"""Generators take the OpenAPI document without a warning, and what they make fits the service."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp8core.spec import parse_spec
from octrain_api.app import create_app
from octrain_api.jobs.schemas import EXAMPLE_SPEC
from tests.api.served import served

pytestmark = pytest.mark.slow

# Every warning of the generator, of Python too, ends it.
COMMAND = (
    *(sys.executable, "-W", "error", "-m", "datamodel_code_generator"),
    *("--input-file-type", "openapi", "--output-model-type", "pydantic_v2.BaseModel"),
    *("--openapi-scopes", "schemas", "paths", "parameters", "requestbodies"),
    *("--target-python-version", "3.11", "--formatters", "builtin", "--use-annotated"),
)


SDK_COMMAND = (
    *(sys.executable, "-W", "error", "-m", "openapi_python_client", "generate"),
    *("--meta", "none", "--fail-on-warning", "--output-path", "octrain_sdk"),
    *("--path", "openapi.json", "--config", "sdk.json"),
)
# What it does not know, and what that is read as: docs/api.md tells users the same.
SDK_MEDIA_TYPES = {
    "application/x-tar": "application/octet-stream",
    "application/vnd.apache.arrow.stream": "application/octet-stream",
    "application/vnd.octrain.telemetry.v1": "application/octet-stream",
    "text/csv": "text/plain",
    "text/event-stream": "text/plain",
}


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


@pytest.fixture
def sdk(document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a generated client, importable as `octrain_sdk`."""
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    # No hooks: a formatter would only take time.
    config = {"content_type_overrides": SDK_MEDIA_TYPES, "post_hooks": []}
    (tmp_path / "sdk.json").write_text(json.dumps(config))
    done = subprocess.run(SDK_COMMAND, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "warning" not in (done.stdout + done.stderr).lower()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "octrain_sdk"


@pytest.mark.filterwarnings("ignore:invalid decimal literal:SyntaxWarning")
def test_a_generated_client_runs_the_service(
    document: dict[str, Any], sdk: Path, copied_url: str, redis_url: str, tmp_path: Path
) -> None:
    modules = {path.stem for path in (sdk / "api").rglob("*.py")}
    assert modules >= {o["operationId"] for p in document["paths"].values() for o in p.values()}
    api, models = "octrain_sdk.api.jobs.", importlib.import_module("octrain_sdk.models")
    create, get, listed = (
        importlib.import_module(api + name) for name in ("create_job", "get_job", "list_jobs")
    )
    # The client wants discriminators also where the service has a default for them.
    spec = models.JobSpec.from_dict(parse_spec(EXAMPLE_SPEC).resolved())
    with served(copied_url, redis_url, tmp_path) as service:
        client_class = importlib.import_module("octrain_sdk.client").AuthenticatedClient
        with client_class(service.url, service.user.key) as client:
            made = create.sync(client=client, body=spec, idempotency_key="once")
            assert isinstance(made, models.JobDetail), made
            again = create.sync_detailed(client=client, body=spec, idempotency_key="once")
            assert (again.status_code, again.parsed.id) == (200, made.id)
            job = get.sync(made.id, client=client)
            assert (job.status, job.spec.to_dict()) == ("queued", made.spec.to_dict())
            assert [one.id for one in listed.sync(client=client, limit=5).items] == [made.id]
            refused = get.sync("job_x", client=client)
            assert isinstance(refused, models.ProblemDetails)
            assert (refused.status, refused.type_) == (404, "/problems/not-found")
