"""The reference of a spec as Markdown: `python -m fp8core.spec.reference > docs/spec.md`."""

from __future__ import annotations

import json
import sys
from typing import Any

from fp8core.spec.annotations import places_of_parts
from fp8core.spec.schema import json_schema

_INTRODUCTION = """\
# The job specification

A spec is one JSON object. `model`, `data` and `recipe` are required; every other field has a
default, is filled in, and is stored with the job. Unknown keys, wrong types, values out of range
and settings that would have no effect are refused, all of them at once, each with a JSON pointer.

```json
{"model": {"source": "huggingface", "id": "owner/name"},
 "data": {"source": "jsonl", "path": "train.jsonl", "format": "chat"},
 "recipe": {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"}}
```

Where a field is one of several parts, `source`, `engine`, `scaling` or `name` chooses. Numbers are
strict: `"10"` and `true` are no whole numbers, and neither is `10.0`.

## Other spellings

* `"tokenizer": "bytes"` and `"tokenizer": "model"`; `"precision": "throughput"`, `"memory"` and
  `"method"`; `"on_divergence": "skip_step"` and the other actions.
* Without `engine` a recipe is `te`; without `scaling`, `te` and `emulated` are `delayed`; a
  `schedule` without `name` is `cosine`.
* All of Hugging Face Accelerate: the arguments of `TERecipeKwargs` and `AORecipeKwargs`, alone or
  in an `fp8_config` block, also with `fp8_` before them; `amax_history_length` and
  `amax_compute_algorithm`; `backend` `TE` or `AO`; `use_mxfp8_block_scaling` for the scaling
  `mxfp8`; formats and algorithms in any case; `override_linear_precision` as
  `"false,false,true"`. Stored is the canonical spelling.
* Refused with the reason: `fp8_format` `E5M2`, MS-AMP, delayed-scaling fields on `torchao`,
  `enable_fsdp_float8_all_gather: true`, `config` and `module_filter_func`.

This page is made from the models by `python -m fp8core.spec.reference`; for programs,
`fp8core.spec.json_schema()` says the same.
"""


def reference() -> str:
    """The whole page, ending in a line feed."""
    schema = json_schema()
    definitions = {**schema["$defs"], "JobSpec": schema}
    by_place: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for part, places in places_of_parts().items():
        by_place.setdefault(places, []).append(definitions[part.__name__])
    sections = [
        section
        for places, variants in by_place.items()
        for section in _sections(places, variants, definitions)
    ]
    return "\n".join([_INTRODUCTION, *sections])


def _sections(
    places: tuple[str, ...], variants: list[dict[str, Any]], definitions: dict[str, Any]
) -> list[str]:
    """One section for each part that may stand there, and one for the fields they all have."""
    where = ", ".join(f"`{place}`" for place in places if place)
    first, *others = [variant["properties"] for variant in variants]
    shared = [name for name in first if others and all(first[name] == o.get(name) for o in others)]
    sections = []
    for variant in variants:
        heading = f"{where}: {variant['title']}" if where else "The spec"
        names = [name for name in variant["properties"] if name not in shared]
        sections.append(_section(heading, variant, names, definitions))
    if shared:
        common = {**variants[0], "description": "These fields are the same in each."}
        sections.append(_section(f"{where}: all of these", common, shared, definitions))
    return sections


def _section(
    heading: str, part: dict[str, Any], names: list[str], definitions: dict[str, Any]
) -> str:
    lines = [f"## {heading}", "", part["description"].partition("\n")[0], ""]
    lines += ["| field | values | default | |", "|---|---|---|---|"]
    for name in names:
        field = part["properties"][name]
        default = "required" if name in part.get("required", ()) else _default(field)
        cells = (f"`{name}`", _values(field, definitions), default, field["description"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return "see there"
    default = field["default"]
    return "its defaults" if isinstance(default, dict) and default else f"`{json.dumps(default)}`"


def _values(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(definitions[field["$ref"].rpartition("/")[2]].get("title", "object"))
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    for choice in ("anyOf", "oneOf"):
        if choice in field:
            return " or ".join(_values(option, definitions) for option in field[choice])
    kind = str(field.get("type", "any value"))
    if kind == "array" and "prefixItems" in field:
        return f"[{', '.join(_values(item, definitions) for item in field['prefixItems'])}]"
    if kind == "array":
        return f"list of {_values(field['items'], definitions)}"
    return kind + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    bounds = [
        f"{sign} {field[key]}"
        for key, sign in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("exclusiveMaximum", "<"),
        )
        if key in field
    ]
    return f" {', '.join(bounds)}" if bounds else ""


if __name__ == "__main__":
    sys.stdout.write(reference())
