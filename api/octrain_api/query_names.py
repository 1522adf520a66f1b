"""Query parameters that a route does not know: refused, since passing over one would do something
else than was asked for."""

import difflib
from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.security.base import SecurityBase

from octrain_api.problems import Problem, ProblemError

# A dependency with an attribute of this name takes every parameter that begins with its value.
PREFIX = "query_prefix"
_MOST_TOLD = 20
_LONGEST_TOLD = 100


async def refuse_unknown_names(request: Request) -> None:
    """422 that says what the route knows. Who has no key where one is needed is told of that."""
    if not request.scope["query_string"]:
        return
    dependant = getattr(request.scope.get("route"), "dependant", None)
    parts = list(_parts(dependant)) if isinstance(dependant, Dependant) else []
    is_closed = any(isinstance(part.call, SecurityBase) for part in parts)
    if not parts or (is_closed and not hasattr(request.state, "principal")):
        return
    names = {parameter.alias for part in parts for parameter in part.query_params}
    prefixes = [p for part in parts if (p := getattr(part.call, PREFIX, None)) is not None]
    unknown = [
        name
        for name in dict.fromkeys(request.query_params)
        if name not in names and not any(name.startswith(p) and name != p for p in prefixes)
    ]
    if unknown:
        raise _refusal(unknown, sorted([*names, *(f"{prefix}KEY" for prefix in prefixes)]))


def _parts(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for inner in dependant.dependencies:
        yield from _parts(inner)


def _refusal(unknown: list[str], known: list[str]) -> Problem:
    told = f"there are {', '.join(known)}" if known else "it takes none"
    errors = []
    for name in unknown[:_MOST_TOLD]:
        shown = name[:_LONGEST_TOLD]
        close = difflib.get_close_matches(shown, known, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        errors.append(
            ProblemError(
                pointer="/query/" + shown.replace("~", "~0").replace("/", "~1"),
                message=f"{shown!r} is no parameter of this route; {meant}{told}",
                code="unknown_parameter",
                suggestion=close[0] if close else None,
            )
        )
    detail = errors[0].message if len(errors) == 1 else f"{len(unknown)} parameters are unknown."
    return Problem(422, "request-invalid", "Request not valid", detail, errors=errors)
