"""The JSON schema of a spec: what forms, editors and other programs work from."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import Any

from fp8core.spec.annotations import places_of_parts
from fp8core.spec.job import JobSpec
from fp8core.spec.parts import Part, field_title

_ENGINES = {
    "te": ("TERecipe", "Transformer Engine"),
    "emulated": ("EmulatedRecipe", "Emulated FP8"),
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a spec in canonical spelling.

    Every field has a title and a description, and its default unless it is required; a field that
    is one of several parts has `oneOf` and a `discriminator` (as in OpenAPI 3.1). What `parse_spec`
    accepts besides (shorthands, Accelerate's spellings) and refuses besides (combinations of
    fields) is not in the schema.
    """
    return deepcopy(_schema())


@lru_cache
def _schema() -> dict[str, Any]:
    schema = {"$schema": DIALECT, **JobSpec.model_json_schema()}
    definitions = schema["$defs"]
    for part in places_of_parts():
        properties = (schema if part is JobSpec else definitions[part.__name__])["properties"]
        for name, field in part.model_fields.items():
            properties[name].setdefault("title", field_title(name))
            properties[name]["description"] = field.description
        for name, default in _defaults_of_parts(part).items():
            properties[name]["default"] = default
    _name_engines(schema["properties"]["recipe"], definitions)
    return schema


def _name_engines(recipe: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Gives each engine of several recipes a definition of its own.

    pydantic nests such a union in the mapping of a discriminator, where only references may stand.
    """
    for engine, (name, title) in _ENGINES.items():
        union = recipe["discriminator"]["mapping"][engine]
        reference = f"#/$defs/{name}"
        recipe["oneOf"] = [
            {"$ref": reference} if option == union else option for option in recipe["oneOf"]
        ]
        recipe["discriminator"]["mapping"][engine] = reference
        definitions[name] = {"title": title, "description": f"{title}, by scaling.", **union}


def _defaults_of_parts(part: type[Part]) -> dict[str, Any]:
    """Defaults that are made by a call, which pydantic leaves out of a schema."""
    defaults: dict[str, Any] = {}
    for name, field in part.model_fields.items():
        if field.default_factory is None or field.default_factory_takes_validated_data:
            continue
        value = field.get_default(call_default_factory=True)
        defaults[name] = value.model_dump(mode="json") if isinstance(value, Part) else value
    return defaults
