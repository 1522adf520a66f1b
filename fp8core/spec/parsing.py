"""From a submitted document to a JobSpec, or to the list of everything wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fp8core.spec.job import JobSpec
from fp8core.spec.problems import Problem, SpecInvalid, pointer_of


def parse_spec(document: Mapping[str, Any] | str | bytes) -> JobSpec:
    data = json.loads(document) if isinstance(document, (str, bytes)) else dict(document)
    recipe = data.get("recipe")
    if isinstance(recipe, dict):
        recipe = {"engine": "te", **recipe}
        if recipe["engine"] in ("te", "emulated"):
            recipe = {"scaling": "delayed", **recipe}
        data = {**data, "recipe": recipe}
    if isinstance(data.get("tokenizer"), str):
        data = {**data, "tokenizer": {"source": data["tokenizer"]}}
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise SpecInvalid(
            Problem(pointer_of(item["loc"]), item["msg"], item["type"]) for item in error.errors()
        ) from None
