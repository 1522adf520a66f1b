"""Reading the models: which parts a field may hold, and where every field stands."""

from __future__ import annotations

from functools import lru_cache
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fp8core.spec.job import JobSpec
from fp8core.spec.parts import Part

_DISCRIMINATORS = ("source", "engine", "scaling", "name")


def parts_of(annotation: Any) -> list[type[Part]]:
    """The parts that a field of this annotation may hold: none if scalar, several if a union."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return [annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return [part for argument in arguments for part in parts_of(argument)]
    if hasattr(annotation, "__metadata__"):
        return parts_of(arguments[0])
    return []


def tags_of(part: type[Part]) -> dict[str, tuple[Any, ...]]:
    """The discriminators of a part and the values by which it is chosen."""
    return {
        name: get_args(field.annotation)
        for name, field in part.model_fields.items()
        if name in _DISCRIMINATORS and get_origin(field.annotation) is Literal
    }


def choices_of(annotation: Any) -> list[Any]:
    """The values that a field of this annotation allows, where it lists them."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return [choice for inner in get_args(annotation) for choice in choices_of(inner)]
    return choices_of(get_args(annotation)[0]) if hasattr(annotation, "__metadata__") else []


class Place(NamedTuple):
    """A place in a document: its path, the part that holds its last key, the parts it may hold."""

    path: tuple[int | str, ...]
    holder: type[Part] | None
    candidates: list[type[Part]]

    @property
    def field(self) -> FieldInfo | None:
        return self.holder.model_fields.get(str(self.path[-1])) if self.holder else None


def resolve(location: tuple[int | str, ...]) -> Place:
    """The place in a document that a location in a pydantic error means.

    pydantic puts the tag of each chosen union branch into the location; a document has no such
    level.
    """
    path: list[int | str] = []
    holder: type[Part] | None = None
    candidates: list[type[Part]] = [JobSpec]
    for step in location:
        if len(candidates) > 1:
            candidates = [
                part for part in candidates if any(step in tags for tags in tags_of(part).values())
            ]
            continue
        path.append(step)
        holder = candidates[0] if candidates else None
        field = holder.model_fields.get(str(step)) if holder else None
        candidates = parts_of(field.annotation) if field else []
    return Place(tuple(path), holder, candidates)


@lru_cache
def places_of_parts() -> dict[type[Part], tuple[str, ...]]:
    """The spec and every part of it, each once, with the JSON pointers at which it may stand."""
    places: dict[type[Part], list[str]] = {}
    _collect(JobSpec, "", places)
    return {part: tuple(pointers) for part, pointers in places.items()}


def _collect(part: type[Part], pointer: str, places: dict[type[Part], list[str]]) -> None:
    pointers = places.setdefault(part, [])
    if pointer not in pointers:
        pointers.append(pointer)
    for name, field in part.model_fields.items():
        for inner in parts_of(field.annotation):
            _collect(inner, f"{pointer}/{name}", places)


@lru_cache
def places_of_fields() -> dict[str, tuple[str, ...]]:
    """For every name of a field, the JSON pointers at which it may stand."""
    places: dict[str, dict[str, None]] = {}
    for part, pointers in places_of_parts().items():
        for name in part.model_fields:
            places.setdefault(name, {}).update(dict.fromkeys(f"{at}/{name}" for at in pointers))
    return {name: tuple(pointers) for name, pointers in places.items()}
