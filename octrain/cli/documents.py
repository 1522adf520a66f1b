"""Documents that a person gives: JSON or YAML from a file or standard input, and `--set a.b=c`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fp8core.spec import SpecInvalid
from fp8core.spec.document import decode_json, faults_of

_YAML_SUFFIXES = (".yaml", ".yml")


def read_document(source: str) -> dict[str, Any]:
    """The object in a file or, for ``-``, on standard input. Errors: typer.BadParameter.

    ``.json`` is JSON and ``.yaml`` or ``.yml`` YAML; anything else is JSON when it begins with a
    brace or a bracket.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"Cannot read {source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{source} is not UTF-8 text") from None
    suffix = Path(source).suffix.lower()
    looks_like_json = text.lstrip()[:1] in ("{", "[") and suffix not in _YAML_SUFFIXES
    if suffix == ".json" or looks_like_json:
        document = _json(text, source)
    else:
        document = yaml_value(text, source)
    faults = faults_of(document)
    if faults:
        raise typer.BadParameter("\n".join([f"{source} is refused:", *map(str, faults)]))
    if not isinstance(document, dict):
        kind = "nothing" if document is None else f"a {type(document).__name__}"
        raise typer.BadParameter(f"{source} must hold a JSON object, not {kind}")
    return document


def yaml_value(text: str, source: str) -> Any:
    """What a YAML 1.2 document says, as JSON would. Errors: typer.BadParameter."""
    import yaml

    try:
        value = yaml.load(text, Loader=_loader())
        json.dumps(value)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise typer.BadParameter(f"{source} is not YAML: {error.problem}{where}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise typer.BadParameter(f"{source} cannot be read as YAML: {error}") from None
    return value


def apply_settings(document: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The document with ``a.b=value`` set, each value read as YAML (so ``3``, ``true``, ``null``,
    ``[1, 2]``). A path that begins with ``/`` is a JSON pointer, for names with dots.

    Errors: typer.BadParameter.
    """
    changed: dict[str, Any] = json.loads(json.dumps(document))
    for setting in settings:
        path, separator, text = setting.partition("=")
        parts = _parts(path)
        if not separator or not all(parts):
            raise typer.BadParameter(
                f"--set takes path=value, such as training.steps=100, not {setting!r}"
            )
        _put(changed, parts, yaml_value(text, f"--set {path}") if text else "", setting)
    return changed


def _parts(path: str) -> list[str]:
    if path.startswith("/"):
        return [part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/")]
    return path.split(".")


def _put(document: dict[str, Any], parts: Sequence[str], value: Any, setting: str) -> None:
    place: Any = document
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(place, list):
            if not part.isdecimal() or int(part) >= len(place):
                at = ".".join(parts[:depth])
                raise typer.BadParameter(
                    f"--set {setting}: {at} is a list of {len(place)}: give a number below that"
                )
            index: Any = int(part)
        elif isinstance(place, dict):
            index = part
            if not last and not isinstance(place.get(part), dict | list):
                place[part] = {}
        else:
            raise typer.BadParameter(f"--set {setting}: {'.'.join(parts[:depth])} has no members")
        if last:
            place[index] = value
        else:
            place = place[index]


def _json(text: str, source: str) -> Any:
    try:
        return decode_json(text, source)
    except SpecInvalid as error:
        raise typer.BadParameter(error.problems[0].message) from None


def _loader() -> Any:
    """A safe loader with the scalars of YAML 1.2's core schema, and no key twice.

    PyYAML follows YAML 1.1, where ``3e-4`` is text, ``no`` is false and a date no JSON value.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as the base class has it

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, str):
                    raise yaml.constructor.ConstructorError(
                        None, None, f"a name must be text, not {key!r}", key_node.start_mark
                    )
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key!r} stands here twice", key_node.start_mark
                    )
                seen.add(key)
            return super().construct_mapping(node, deep=deep)

    core = (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
        ("null", r"~|null|Null|NULL|", "~nN\0"),
        ("merge", r"<<", "<"),
    )
    for kind, pattern, first in core:
        letters = ["" if letter == "\0" else letter for letter in first]
        Loader.add_implicit_resolver(
            f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"), letters
        )
    # 007 is seven in YAML 1.2, not octal.
    Loader.add_constructor(
        "tag:yaml.org,2002:int",
        # What has more digits than these is refused for its size, whatever follows.
        lambda loader, node: int(node.value[:25], 16 if "x" in node.value else 10),
    )
    Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))
    return Loader
