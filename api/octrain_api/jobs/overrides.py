"""A spec with changes over it, for clones and drafts."""

from typing import Any

from octrain_api.merge_patch import merge_patch

# Parts of a spec that are of one kind or another, and the members that say which.
_KINDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("model",): ("source",),
    ("tokenizer",): ("source",),
    ("data",): ("source",),
    ("recipe",): ("engine", "scaling"),
    ("training", "optimizer"): ("name",),
    ("training", "schedule"): ("name",),
}


def overridden(
    spec: dict[str, Any], overrides: dict[str, Any], *, onto: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`spec` with the merge patch `overrides` (RFC 7396) over it; or `onto`, a part of that spec.

    A part that becomes of another kind (another engine, another source) begins anew: members of
    the old kind would be unknown to the new one. So does a recipe that is named.
    """
    base = dict(spec if onto is None else onto)
    for place, names in _KINDS.items():
        given = _at(overrides, place)
        old = _at(spec, place)
        if not isinstance(given, dict) or not isinstance(old, dict):
            continue
        other = any(name in given and given[name] != old.get(name) for name in names)
        if other or (place == ("recipe",) and "name" in given):
            base = _without(base, place)
    merged = merge_patch(base, overrides)
    assert isinstance(merged, dict)
    return merged


def _at(value: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _without(value: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    copy = dict(value)
    if len(place) == 1:
        copy.pop(place[0], None)
    elif isinstance(copy.get(place[0]), dict):
        copy[place[0]] = _without(copy[place[0]], place[1:])
    return copy
