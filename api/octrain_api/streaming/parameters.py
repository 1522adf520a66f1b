"""What can be asked of a live stream, as endpoints take it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import Depends, Header, Query, Request

from octrain_api.dependencies import ContextDep
from octrain_api.problems import Problem, ProblemError
from octrain_api.sessions.cookies import OpenSession
from octrain_api.streaming.messages import Choice, Kind

_MOST_GLOBS = 100


def invalid(pointer: str, message: str, code: str) -> Problem:
    """422 for one value of a request."""
    error = ProblemError(pointer=pointer, message=message, code=code)
    return Problem(422, "request-invalid", "Request not valid", message, errors=[error])


def chosen(include: Sequence[str] | None, offered: frozenset[Kind]) -> frozenset[Kind]:
    """The kinds in `include`, repeated or separated by commas; all that are offered without."""
    if include is None:
        return offered
    names = [name for value in include for name in value.split(",") if name]
    unknown = [name for name in names if name not in offered]
    if unknown or not names:
        there = ", ".join(kind for kind in Kind if kind in offered)
        wrong = f"{unknown[0]!r} cannot be included" if unknown else "nothing is included"
        raise invalid("/query/include", f"{wrong}; there are {there}", "enum")
    return frozenset(Kind(name) for name in names)


async def _choice(
    include: Annotated[
        list[str] | None,
        Query(description="status, events, metrics, logs: repeat it, or use commas; all without"),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        Query(
            description="patterns of metric names (`*` and `?`, which match `/` too): repeat it, "
            "or use commas; every metric without"
        ),
    ] = None,
) -> Choice:
    globs = tuple(sorted({glob for value in metrics or () for glob in value.split(",") if glob}))
    if len(globs) > _MOST_GLOBS or any(len(glob) > 512 for glob in globs):
        text = f"at most {_MOST_GLOBS} patterns of 512 characters can be given"
        raise invalid("/query/metrics", text, "too_long")
    return Choice(chosen(include, frozenset(Kind)), globs)


ChoiceDep = Annotated[Choice, Depends(_choice)]

LastEventId = Annotated[str | None, Header(max_length=200)]

MostSeconds = Annotated[
    float | None,
    Query(gt=0, le=86_400, description="end the stream (`reconnect`) after so long at the latest"),
]


async def _still_allowed(request: Request, context: ContextDep) -> Callable[[], Awaitable[bool]]:
    """Whether the key or session of this request still holds; asked while a stream is open."""
    session = getattr(request.state, "session", None)
    key = request.headers.get("authorization", "").partition(" ")[2].strip()
    credential = session.token if isinstance(session, OpenSession) else key

    async def read() -> bool:
        if isinstance(session, OpenSession):
            return await context.sessions.of(session.token) is not None
        return await context.principals.of(key) is not None

    return lambda: context.streams.still_holds(credential, read)


StillAllowed = Annotated[Callable[[], Awaitable[bool]], Depends(_still_allowed)]
