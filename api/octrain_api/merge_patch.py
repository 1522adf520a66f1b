"""JSON merge patch (RFC 7396)."""

from typing import Any


def merge_patch(target: Any, patch: Any) -> Any:
    """`target` with `patch` over it: objects are merged, null removes, all else replaces.

    Neither is changed. Source: RFC 7396, section 2.
    """
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged
