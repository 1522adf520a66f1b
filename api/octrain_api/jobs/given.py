"""What somebody wrote of a spec, kept beside the whole spec so that readers can tell the two apart.

It is spelled as the spec is, and holds no field that the service filled in. Of a clone or of an
edited draft it is what was written of the first spec, with what was written since over it.
"""

from typing import Any

from fp8core.spec.spellings import Canonical
from octrain_api.jobs.overrides import overridden

_CHOICES = ("engine", "scaling")


def as_given(body: dict[str, Any]) -> dict[str, Any]:
    """A body that was taken as a spec, in canonical spelling, without what that spelling adds.

    A named recipe stays what was written: its name. The body is not changed.
    """
    canonical = Canonical(body)
    given = canonical.document
    recipe, schedule = body.get("recipe"), (body.get("training") or {}).get("schedule")
    if isinstance(recipe, dict):
        for name in _CHOICES:
            if name not in recipe and f"/recipe/{name}" not in canonical.origins:
                given["recipe"].pop(name, None)
    if isinstance(schedule, dict) and "name" not in schedule:
        del given["training"]["schedule"]["name"]
    return given


def given_with(
    given: dict[str, Any] | None, spec: dict[str, Any], overrides: dict[str, Any]
) -> dict[str, Any] | None:
    """What is given of `spec` once `overrides` go over it; None where it was never known."""
    return overridden(spec, overrides, onto=given) if given is not None else None
