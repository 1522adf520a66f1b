"""pydantic's errors turned into problems that a person understands."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fp8core.spec.advice import unknown_key
from fp8core.spec.annotations import Place, choices_of, resolve, tags_of
from fp8core.spec.document import kind_of, quoted, shortened
from fp8core.spec.job import LABEL_KEY_PATTERN, SECRET_NAME_PATTERN, SECRET_VARIABLE_PATTERN
from fp8core.spec.parts import HUB_ID_PATTERN, REVISION_PATTERN
from fp8core.spec.problems import MOST_PROBLEMS, Problem, pointer_of
from fp8core.spec.sources import (
    JOB_ID_PATTERN,
    SHA256_PATTERN,
    SPLIT_PATTERN,
    UPLOAD_ID_PATTERN,
)

Path = tuple[int | str, ...]

_PATTERNS = {
    HUB_ID_PATTERN: 'must be a hub id such as "owner/name"',
    REVISION_PATTERN: "must be a branch, tag or commit: letters, digits and . _ / -",
    JOB_ID_PATTERN: 'must be the id of a job, "job_" and letters and digits',
    SPLIT_PATTERN: 'must be the name of a split, such as "train"',
    SHA256_PATTERN: "must be a sha256: 64 digits 0-9 and a-f",
    UPLOAD_ID_PATTERN: "must be the id of an uploaded data set: letters, digits and . _ -",
    LABEL_KEY_PATTERN: "must consist of letters, digits and . _ / -",
    SECRET_VARIABLE_PATTERN: "must be a variable such as HF_TOKEN: capitals, ending in TOKEN, KEY, "
    "KEY_ID, SECRET or PASSWORD",
    SECRET_NAME_PATTERN: "must be the name of a secret, never its value: a-z, 0-9 and -",
}
_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
_LENGTHS = {
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
}
_E5M2 = (
    'must be "HYBRID" or "E4M3"; Transformer Engine refuses to train in E5M2 alone, whose 2 bits '
    "of mantissa are too few for weights and activations (HYBRID uses E5M2 for gradients only)"
)


class Finding(NamedTuple):
    """A problem in a validated document, and the smallest value whose removal would end it."""

    problem: Problem
    path: Path
    removable: Path


def findings_of(error: ValidationError) -> list[Finding]:
    """What pydantic found, told in our words; at most `MOST_PROBLEMS`."""
    errors = [
        details
        for details in error.errors(include_url=False)
        # Defaults that depend on a field with an error of its own; no error in themselves.
        if details["type"] != "default_factory_not_called"
    ]
    return [_finding(details) for details in errors[:MOST_PROBLEMS]]


def _finding(details: ErrorDetails) -> Finding:
    place = resolve(details["loc"])
    if place.path[:1] == ("labels",) and len(place.path) == 3:
        # The key of a mapping is at fault, which pydantic marks with one more step, "[key]".
        place = place._replace(path=place.path[:2])
    path, kind, value = place.path, details["type"], details["input"]
    pointer, context = pointer_of(path), details.get("ctx", {})
    if kind.startswith("union_tag"):
        discriminator = str(context["discriminator"]).strip("'")
        problem = _unchosen(place, value, discriminator)
        return Finding(problem, (*path, discriminator), path)
    if kind == "extra_forbidden" and place.holder:
        return Finding(unknown_key(path, place.holder), path, path)
    if kind == "literal_error":
        return Finding(_not_one_of(place, value), path, path)
    if kind == "missing":
        return Finding(Problem(pointer, _required(place), "missing"), path, path[:-1])
    if kind in _TYPES:
        message, code = f"must be {_TYPES[kind]}, not {kind_of(value)}", "wrong_type"
    elif kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        message, code = f"must be {words} {context[key]}, not {value}", "out_of_range"
    elif kind in _LENGTHS:
        words, key, unit = _LENGTHS[kind]
        bound = context[key]
        message = f"must have {words} {bound} {unit}{'' if bound == 1 else 's'}"
        code = "too_long" if kind.endswith("long") else "too_short"
    elif kind == "string_pattern_mismatch":
        message, code = _PATTERNS[context["pattern"]], "bad_format"
        # Somebody may have written the secret itself there.
        if context["pattern"] != SECRET_NAME_PATTERN:
            message += f", not {quoted(value)}"
    elif kind == "compound":
        message, code = f"{context['message']}, not {_items_of(value)}", "wrong_type"
    else:  # A constraint that no field had when this was written.
        message, code = details["msg"], kind
    # Taking an item out of a list would move those behind it, so the list goes.
    depth = next((at for at, key in enumerate(path) if isinstance(key, int)), len(path))
    return Finding(Problem(pointer, message, code), path, path[:depth])


def _items_of(value: Any) -> str:
    return shortened(json.dumps(value)) if isinstance(value, list) else kind_of(value)


def _required(place: Place) -> str:
    if place.field is None or not place.field.description:
        return "is required"
    description = place.field.description
    return f"is required: {description[0].lower()}{description[1:].rstrip('.')}"


def _not_one_of(place: Place, value: Any) -> Problem:
    pointer = pointer_of(place.path)
    if place.path[-1] == "fp8_format" and value == "E5M2":
        return Problem(pointer, _E5M2, "unsupported", "HYBRID")
    return _choose(pointer, value, choices_of(place.field.annotation if place.field else None))


def _unchosen(place: Place, value: Any, discriminator: str) -> Problem:
    """A union whose discriminator is absent or names none of its parts."""
    tags = [tag for part in place.candidates for tag in tags_of(part).get(discriminator, ())]
    choices = list(dict.fromkeys(tags))
    pointer = pointer_of((*place.path, discriminator))
    if isinstance(value, dict) and discriminator not in value:
        message = f"is required: one of {_listed(choices)}"
        return Problem(pointer, message, "missing")
    return _choose(pointer, value.get(discriminator), choices)


def _choose(pointer: str, value: Any, choices: list[Any]) -> Problem:
    message = f"must be {'one of ' if len(choices) > 1 else ''}{_listed(choices)}"
    message += f", not {kind_of(value)}"
    texts = [choice for choice in choices if isinstance(choice, str)]
    close = get_close_matches(value, texts, n=1) if isinstance(value, str) else []
    if close:
        message += f"; did you mean {quoted(close[0])}?"
    return Problem(pointer, message, "not_one_of", close[0] if close else None)


def _listed(choices: list[Any]) -> str:
    return ", ".join(json.dumps(choice) for choice in choices)
