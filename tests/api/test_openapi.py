"""The OpenAPI document: valid, complete, and changed only on purpose."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import validate

from octrain_api.app import create_app
from octrain_api.openapi_errors import declared_kinds
from octrain_api.problem_kinds import KINDS
from tests.api.openapi_changes import breaking, reachable

SNAPSHOT = Path(__file__).with_name("openapi.json")
RENEW = "OCTRAIN_RENEW_OPENAPI=1 pytest tests/api/test_openapi.py"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The document as it is served."""
    return json.loads(json.dumps(create_app().openapi()))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Operations by id."""
    found = [o for methods in document["paths"].values() for o in methods.values()]
    by_id = {operation["operationId"]: operation for operation in found}
    assert len(by_id) == len(found), "operation ids are unique"
    return by_id


def test_is_valid(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    validate(document)


def test_is_as_committed(document: dict[str, Any]) -> None:
    if os.environ.get("OCTRAIN_RENEW_OPENAPI"):
        SNAPSHOT.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    committed = json.loads(SNAPSHOT.read_text())
    lost = breaking(committed, document)
    assert not lost, "this can break clients of /v1: " + "; ".join(lost)
    assert committed == document, f"the document has changed: look at it, then renew by\n{RENEW}"


def _remove(path: str) -> Callable[[dict[str, Any]], None]:
    *way, last = path.split(" ")

    def change(document: dict[str, Any]) -> None:
        inner: Any = document
        for step in way:
            inner = inner[step]
        if isinstance(inner, list):
            inner.remove(last)
        else:
            del inner[last]

    return change


def _require(schema: str, member: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["components"]["schemas"][schema].setdefault("required", []).append(member)

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_remove("paths /v1/jobs"), "path removed: /v1/jobs"),
        (_remove("paths /v1/jobs/{job_id} get"), "operation removed: GET /v1/jobs/{job_id}"),
        (
            _remove("paths /v1/jobs/{job_id}/model get responses 206"),
            "answer removed: GET /v1/jobs/{job_id}/model 206",
        ),
        (_remove("components schemas JobObject properties detail"), "member removed: JobObject."),
        (_remove("components schemas Status enum paused"), "value removed: Status 'paused'"),
        (_remove("components schemas JobObject required id"), "member may be missing now: JobObj"),
        (_require("WebhookRequest", "events"), "member required now: WebhookRequest.events"),
        (_require("SpecTraining", "steps"), "member required now: SpecTraining.steps"),
    ],
)
def test_a_loss_is_told(
    document: dict[str, Any], change: Callable[[dict[str, Any]], None], told: str
) -> None:
    changed = copy.deepcopy(document)
    assert breaking(document, changed) == []
    change(changed)
    assert any(line.startswith(told) for line in breaking(document, changed))
    additions = [line for line in breaking(changed, document) if "removed" in line]
    assert additions == [], "what is added breaks nobody"


def _unbounded(schema: Any, schemas: dict[str, Any], path: str, seen: set[str]) -> list[str]:
    """Where the schema takes whole numbers of any size."""
    if isinstance(schema, list):
        return [
            found
            for index, inner in enumerate(schema)
            for found in _unbounded(inner, schemas, f"{path}/{index}", seen)
        ]
    if not isinstance(schema, dict):
        return []
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in seen:
            return []
        seen.add(name)
        return _unbounded(schemas[name], schemas, name, seen)
    if schema.get("type") == "integer" and not {"enum", "const"} & set(schema):
        low = {"minimum", "exclusiveMinimum"} & set(schema)
        high = {"maximum", "exclusiveMaximum"} & set(schema)
        return [] if low and high else [path]
    plain = {"default", "enum", "example", "examples", "const"}
    return [
        found
        for key, inner in schema.items()
        if key not in plain
        for found in _unbounded(inner, schemas, f"{path}/{key}", seen)
    ]


def test_whole_numbers_that_are_taken_are_bounded(
    document: dict[str, Any], operations: dict[str, dict[str, Any]]
) -> None:
    """Some column, or 64 bits, end what can be stored: a client is told where."""
    schemas, seen = document["components"]["schemas"], set[str]()
    assert _unbounded({"anyOf": [{"type": "integer", "minimum": 0}]}, {}, "", set()) == ["/anyOf/0"]
    found = [
        place
        for identifier, operation in operations.items()
        for taken in (operation.get("requestBody", {}), operation.get("parameters", []))
        for place in _unbounded(taken, schemas, identifier, seen)
    ]
    assert found == []


def test_operations_are_described(
    document: dict[str, Any], operations: dict[str, dict[str, Any]]
) -> None:
    tags = {tag["name"] for tag in document["tags"] if tag["description"]}
    for identifier, operation in operations.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", identifier)
        assert operation["summary"], identifier
        assert operation["description"].rstrip().endswith("."), identifier
        assert set(operation["tags"]) <= tags, identifier
        assert operation["tags"], identifier


def test_every_body_has_an_example_that_fits(
    document: dict[str, Any], operations: dict[str, dict[str, Any]]
) -> None:
    checked = 0
    for identifier, operation in operations.items():
        for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
            if content["schema"].get("format") == "binary":
                continue
            assert content["examples"], (identifier, media_type)
            whole = {"components": document["components"], **content["schema"]}
            for example in content["examples"].values():
                jsonschema.Draft202012Validator(whole).validate(example["value"])
                checked += 1
    assert checked > 20


def test_every_kind_of_problem_is_some_operations(
    document: dict[str, Any], operations: dict[str, dict[str, Any]]
) -> None:
    assert declared_kinds(operations) == {}
    text = json.dumps(document)
    told = set(re.findall(r"\(/problems/([a-z-]+)\)", text))
    # These answer what is no operation.
    assert set(KINDS) - told == {"method-not-allowed", "http-error"}
    for identifier, operation in operations.items():
        answers = operation["responses"]
        if operation.get("security"):
            assert "401" in answers, identifier
            assert ("403" in answers) == bool(operation["security"][0]["ApiKey"]) or (
                # Any key will do; a session must prove itself all the same.
                identifier in ("get_own_key", "delete_session")
            ), identifier
        assert {"400", "429", "500", "503"} <= set(answers), identifier
        if "requestBody" in operation:
            assert {"413", "415", "422"} <= set(answers), identifier


def test_unions_have_discriminators(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    unions = {
        "JobSpec.recipe": "engine",
        "JobSpec.model": "source",
        "JobSpec.data": "source",
        "SpecTraining.schedule": "name",
        "SpecTeRecipe": "scaling",
        "SpecEmulatedRecipe": "scaling",
    }
    for place, name in unions.items():
        schema, _, member = place.partition(".")
        union = schemas[schema]["properties"][member] if member else schemas[schema]
        assert union["discriminator"]["propertyName"] == name
        for reference in union["discriminator"]["mapping"].values():
            assert reference.rpartition("/")[2] in schemas


def test_every_schema_is_used(document: dict[str, Any]) -> None:
    used = set().union(
        *(reachable(document, part) for part in ("requestBody", "responses", "parameters"))
    )
    assert set(document["components"]["schemas"]) == used
