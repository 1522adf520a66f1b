"""Series of one job, past the framework, as `octrain_api.jobs.direct` does it for jobs.

A dashboard asks for nothing so often, and to find the route and to resolve its dependencies costs
as much as to read a million points as buckets. Answered here is only what the endpoint would take
as it is; whatever else there is to say about a request, an error above all, the endpoint says.
"""

import inspect
import re
from typing import Any
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from octrain_api.dependencies import Context
from octrain_api.keys.principal import Principal
from octrain_api.keys.principal import Scope as KeyScope
from octrain_api.metrics.endpoints import FormatQuery, Since, ask_of, router, series_of
from octrain_api.problems import Problem, database_problem, response

__all__ = ["DirectMetrics"]

_PATH = re.compile(r"(?:/v1)?/jobs/([A-Za-z0-9_]{1,64})/metrics")
# Bytes of a query string; longer ones are rare.
_LONGEST = 4096
_PARAMETERS: dict[str, Any] = {
    **{
        name: (parameter.annotation, parameter.default)
        for name, parameter in inspect.signature(ask_of).parameters.items()
    },
    "since": (Since, 0),
    "format": (FormatQuery, None),
}
_Asked: type[BaseModel] = create_model(
    "_Asked", __config__=ConfigDict(extra="forbid"), **_PARAMETERS
)


def _asked(query: bytes) -> dict[str, Any] | None:
    """The parameters by name; None where the endpoint would refuse them, or may have to."""
    if len(query) > _LONGEST:
        return None
    given: dict[str, Any] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name == "name":
            given.setdefault(name, []).append(value)
        elif name in given:
            return None
        else:
            given[name] = value
    try:
        asked = _Asked.model_validate(given)
    except ValidationError:
        return None
    return {name: getattr(asked, name) for name in _Asked.model_fields}


class DirectMetrics:
    """Answers `GET /jobs/{id}/metrics` where nothing is in doubt; passes on other requests."""

    def __init__(self, app: ASGIApp, *, context: Context) -> None:
        self._app = app
        self._context = context
        routes: dict[str, BaseRoute] = {getattr(r, "name", ""): r for r in router.routes}
        self._route = routes["read_metrics"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        answer: ASGIApp | None = None
        if scope["type"] == "http" and scope["method"] == "GET":
            found = _PATH.fullmatch(scope["path"])
            principal = scope["state"].get("principal")
            if (
                found is not None
                and isinstance(principal, Principal)
                and principal.may(KeyScope.JOBS_READ)
            ):
                answer = await self._answer(scope, principal, found[1])
        await (answer or self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, principal: Principal, job_id: str) -> ASGIApp | None:
        asked = _asked(scope["query_string"])
        if asked is None:
            return None
        since, wanted = asked.pop("since"), asked.pop("format")
        scope["route"], scope["path_params"] = self._route, {"job_id": job_id}
        request = Request(scope)
        try:
            ask = await ask_of(**asked)
            return await series_of(request, self._context, principal, job_id, ask, since, wanted)
        except Exception as error:
            problem = error if isinstance(error, Problem) else database_problem(error)
            if problem is None:
                raise
            return response(request, problem)
