"""The JSON schema: valid, complete enough for a form, and of one mind with `parse_spec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from fp8core.spec import json_schema, parse_spec
from fp8core.spec.annotations import places_of_parts
from fp8core.spec.reference import reference

Spec = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema())


def _properties() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    schema = json_schema()
    for part in places_of_parts():
        definition = schema["$defs"].get(part.__name__, schema)
        assert set(definition["properties"]) == set(part.model_fields)
        for name, field in definition["properties"].items():
            yield part.__name__, name, field, definition


def test_it_is_a_schema_of_the_dialect_it_names() -> None:
    schema = json_schema()
    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(schema)


def test_a_caller_may_change_its_copy() -> None:
    json_schema()["properties"].clear()
    assert json_schema()["properties"]


def test_every_part_and_field_has_a_title_and_a_description() -> None:
    schema = json_schema()
    for part in places_of_parts():
        definition = schema["$defs"].get(part.__name__, schema)
        assert definition["title"], part
        assert definition["description"], part
        assert definition["additionalProperties"] is False, part
    for part_name, name, field, _ in _properties():
        assert field["title"], (part_name, name)
        assert len(field["description"]) > 8, (part_name, name)


def test_every_field_is_required_or_has_its_default() -> None:
    for part_name, name, field, definition in _properties():
        required = name in definition.get("required", ())
        if (part_name, name) == ("JobSpec", "tokenizer"):
            continue  # depends on the model; the description says how
        assert required != ("default" in field), (part_name, name)


def test_every_default_satisfies_its_own_field() -> None:
    schema = json_schema()
    for part_name, name, field, _ in _properties():
        if "default" in field:
            holder = {**field, "$defs": schema["$defs"]}
            errors = list(jsonschema.Draft202012Validator(holder).iter_errors(field["default"]))
            assert not errors, (part_name, name, errors)


def test_every_choice_of_parts_names_what_chooses() -> None:
    schema = json_schema()
    sections = schema["properties"].values()
    training = schema["$defs"]["Training"]["properties"].values()
    nodes = [*sections, *training, *schema["$defs"].values()]
    unions = [node for node in nodes if "oneOf" in node]
    assert len(unions) == 7  # model, tokenizer, data, recipe, te, emulated, schedule
    for union in unions:
        mapping = union["discriminator"]["mapping"]
        assert {option["$ref"] for option in union["oneOf"]} == set(mapping.values())
        for tag, reference_ in mapping.items():
            part = schema["$defs"][reference_.removeprefix("#/$defs/")]
            if "oneOf" not in part:
                choice = part["properties"][union["discriminator"]["propertyName"]]
                assert tag in [choice.get("const"), *choice.get("enum", ())]


VALID: list[dict[str, Any]] = [
    {},
    {"recipe": {"engine": "te"}},
    {"recipe": {"engine": "emulated", "amax_history_len": 16}},
    {"recipe": {"engine": "emulated", "scaling": "current"}},
    {"recipe": {"engine": "torchao", "scaling": "rowwise"}},
    {"recipe": {"engine": "amp", "dtype": "fp16", "initial_loss_scale": 1024}},
    {"recipe": {"override_linear_precision": [False, False, True]}},
    {"training": {"schedule": {"warmup_steps": 5}}},
    {"training": {"optimizer": {"lr": 1, "betas": [0, 0.5]}}},
    {"labels": {"team/a": "x"}},
    {"model": {"source": "job", "job": "job_1", "checkpoint": 100}},
]
INVALID: list[dict[str, Any]] = [
    {"xyzzy": 1},
    {"recipe": {"engine": "tee"}},
    {"recipe": {"amax_history_len": 0}},
    {"recipe": {"amax_history_len": "16"}},
    {"recipe": {"fp8_format": "E5M2"}},
    {"recipe": {"override_linear_precision": [True, False]}},
    {"recipe": {"override_linear_precision": [True, False, False, False]}},
    {"recipe": {"engine": "torchao", "margin": 1}},
    {"recipe": {"engine": "emulated", "scaling": "block"}},
    {"training": {"steps": 0}},
    {"training": {"optimizer": {"lr": 0}}},
    {"training": {"schedule": {"name": "warmup_stable_decay"}}},
    {"labels": {"a b": "x"}},
    {"labels": {"a": "x" * 257}},
    {"model": {"source": "path"}},
    {"model": {"source": "job", "job": "job_1", "checkpoint": "newest"}},
    {"tokenizer": {}},
    {"evaluation": {"fraction": 1}},
]


@pytest.mark.parametrize("sections", VALID)
def test_what_is_valid(
    spec: Spec, validator: jsonschema.Draft202012Validator, sections: dict[str, Any]
) -> None:
    validator.validate(spec(**sections))
    validator.validate(parse_spec(spec(**sections)).resolved())


@pytest.mark.parametrize("sections", INVALID)
def test_what_is_invalid(
    spec: Spec, validator: jsonschema.Draft202012Validator, sections: dict[str, Any]
) -> None:
    assert not validator.is_valid(spec(**sections))


def test_the_page_in_docs_is_the_reference(request: pytest.FixtureRequest) -> None:
    page = request.config.rootpath / "docs" / "spec.md"
    assert page.read_text() == reference(), "run: python -m fp8core.spec.reference > docs/spec.md"
    for part_name, name, _, _ in _properties():
        assert f"\n| `{name}` |" in page.read_text(), (part_name, name)
