"""Which differences of two OpenAPI documents can break a client, told one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Document = dict[str, Any]


def breaking(old: Document, new: Document) -> list[str]:
    """What clients of the old document may rely on and the new one takes away."""
    return [
        *_operations(old, new),
        *_schemas(old, new),
    ]


def _operations(old: Document, new: Document) -> Iterator[str]:
    for path, methods in old["paths"].items():
        if path not in new["paths"]:
            yield f"path removed: {path}"
            continue
        for method, before in methods.items():
            where = f"{method.upper()} {path}"
            after = new["paths"][path].get(method)
            if after is None:
                yield f"operation removed: {where}"
                continue
            if before["operationId"] != after["operationId"]:
                yield f"operation renamed: {before['operationId']} to {after['operationId']}"
            yield from _parameters(where, before, after)
            yield from _bodies(where, before, after)
            for status, answer in before["responses"].items():
                if not status.startswith("2"):
                    continue
                if status not in after["responses"]:
                    yield f"answer removed: {where} {status}"
                    continue
                kept = after["responses"][status].get("content", {})
                for media_type in answer.get("content", {}):
                    if media_type not in kept:
                        yield f"media type removed: {where} {status} {media_type}"


def _parameters(where: str, before: Document, after: Document) -> Iterator[str]:
    old = {(p["in"], p["name"]): p for p in before.get("parameters", [])}
    new = {(p["in"], p["name"]): p for p in after.get("parameters", [])}
    for key, parameter in old.items():
        if key not in new:
            yield f"parameter removed: {where} {key[1]}"
        else:
            yield from _narrowed(f"{where} {key[1]}", parameter["schema"], new[key]["schema"])
    for key, parameter in new.items():
        if parameter.get("required") and not old.get(key, {}).get("required"):
            yield f"parameter required now: {where} {key[1]}"


def _bodies(where: str, before: Document, after: Document) -> Iterator[str]:
    old, new = before.get("requestBody", {}), after.get("requestBody", {})
    for media_type in old.get("content", {}):
        if media_type not in new.get("content", {}):
            yield f"body removed: {where} {media_type}"
    if new.get("required") and not old.get("required"):
        yield f"body required now: {where}"


def _schemas(old: Document, new: Document) -> Iterator[str]:
    sent = reachable(new, "requestBody")
    kept = new["components"]["schemas"]
    for name, before in old["components"]["schemas"].items():
        if name not in kept:
            yield f"schema removed: {name}"
            continue
        yield from _narrowed(name, before, kept[name], sent=name in sent)


def _narrowed(where: str, old: Any, new: Any, *, sent: bool = True) -> Iterator[str]:
    """Losses of one schema; `sent` by clients, so that a new required member breaks them."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return
    for value in _values(old):
        # No list of values at all takes every one.
        if _values(new) and value not in _values(new):
            yield f"value removed: {where} {value!r}"
    if "type" in old and "type" in new and old["type"] != new["type"]:
        yield f"type changed: {where} {old['type']} to {new['type']}"
    before, after = old.get("properties", {}), new.get("properties", {})
    for member, schema in before.items():
        if member not in after:
            yield f"member removed: {where}.{member}"
        else:
            yield from _narrowed(f"{where}.{member}", schema, after[member], sent=sent)
    required = set(new.get("required", ())) - set(old.get("required", ()))
    if sent:
        for member in sorted(required):
            yield f"member required now: {where}.{member}"
    else:
        for member in sorted(set(old.get("required", ())) - set(new.get("required", ()))):
            if member in after:
                yield f"member may be missing now: {where}.{member}"
    if sent:
        for bound, narrower in (
            ("maximum", float.__lt__),
            ("maxLength", float.__lt__),
            ("maxItems", float.__lt__),
            ("minimum", float.__gt__),
            ("minLength", float.__gt__),
            ("minItems", float.__gt__),
        ):
            if bound in new and (
                bound not in old or narrower(float(new[bound]), float(old[bound]))
            ):
                yield f"bound narrowed: {where} {bound}"
    yield from _narrowed(f"{where}[]", old.get("items"), new.get("items"), sent=sent)
    for keyword in ("oneOf", "anyOf"):
        options = {_name(option) for option in new.get(keyword, ())}
        for option in old.get(keyword, ()):
            if options and _name(option) not in options:
                yield f"option removed: {where} {_name(option)}"


def _values(schema: Document) -> list[Any]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _name(schema: Document) -> str:
    return str(schema.get("$ref") or schema.get("const") or schema.get("type") or schema)


def reachable(document: Document, part: str) -> set[str]:
    """Names of the schemas that this part of any operation leads to."""
    found: set[str] = set()
    schemas = document["components"]["schemas"]
    waiting: list[Any] = [
        operation.get(part, {})
        for methods in document["paths"].values()
        for operation in methods.values()
    ]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            name = str(one.get("$ref", "")).rpartition("/")[2]
            if name in schemas and name not in found:
                found.add(name)
                waiting.append(schemas[name])
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
    return found
