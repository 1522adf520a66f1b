"""The two requests that a service of jobs lives on, past the framework: a new job, one job read.

The framework finds a route, resolves a tree of dependencies and opens a session for each request,
which together cost several times what these two have to do. Here they are answered from what the
layers before have found already: who asks, and the body's JSON. Only requests without a query are;
whatever else there is to say about one, an error above all, the long way through the endpoints
(`octrain_api.jobs.endpoints`) says. Both call the same functions.
"""

import re

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from octrain_api.dependencies import Context, request_session
from octrain_api.idempotency.once import HEADER, LONGEST_KEY, once_of
from octrain_api.jobs.endpoints import make_job, router
from octrain_api.jobs.reading import LONGEST_TAGS, conditional
from octrain_api.keys.principal import Principal
from octrain_api.keys.principal import Scope as KeyScope
from octrain_api.problems import Problem, database_problem, response

_JOBS = frozenset({"/v1/jobs", "/jobs"})
_JOB = re.compile(r"(?:/v1)?/jobs/([A-Za-z0-9_]{1,64})")


class DirectRequests:
    """Answers `POST /jobs` and `GET /jobs/{id}` where nothing is in doubt; passes on others."""

    def __init__(self, app: ASGIApp, *, context: Context) -> None:
        self._app = app
        self._context = context
        routes: dict[str, BaseRoute] = {getattr(r, "name", ""): r for r in router.routes}
        self._create, self._get = routes["create_job"], routes["get_job"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        answer = None
        if scope["type"] == "http" and not scope["query_string"]:
            principal = scope["state"].get("principal")
            if isinstance(principal, Principal):
                answer = await self._answer(scope, principal, receive)
        await (answer or self._app)(scope, receive, send)

    async def _answer(
        self, scope: Scope, principal: Principal, receive: Receive
    ) -> Response | None:
        method, path = scope["method"], scope["path"]
        try:
            if method == "POST" and path in _JOBS and principal.may(KeyScope.JOBS_WRITE):
                return await self._make(scope, principal, receive)
            if method == "GET" and principal.may(KeyScope.JOBS_READ):
                found = _JOB.fullmatch(path)
                return await self._read(scope, principal, found[1]) if found else None
        except Exception as error:
            problem = error if isinstance(error, Problem) else database_problem(error)
            if problem is None:
                raise
            return response(Request(scope), problem)
        return None

    async def _make(self, scope: Scope, principal: Principal, receive: Receive) -> Response | None:
        key = Headers(scope=scope).get(HEADER)
        if "json" not in scope["state"] or (key is not None and not 1 <= len(key) <= LONGEST_KEY):
            return None
        scope["route"] = self._create
        request = Request(scope, receive)
        async with request_session(self._context, request) as session:
            once = once_of(request, session, principal, key)
            return await make_job(request, session, self._context, principal, once)

    async def _read(self, scope: Scope, principal: Principal, job_id: str) -> Response | None:
        tags = Headers(scope=scope).get("if-none-match")
        if tags is not None and len(tags) > LONGEST_TAGS:
            return None
        scope["path_params"] = {"job_id": job_id}
        view = await self._context.jobs.read(job_id)
        if view is None or not principal.sees(view.owner):
            return None
        scope["route"] = self._get
        return conditional(view.body, view.etag, tags)
