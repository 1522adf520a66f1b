"""RFC 9457 problem details for every error that leaves the service."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, Field
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path

from octrain_api.numbers import clean
from octrain_api.problem_kinds import KINDS

log = logging.getLogger("octrain_api.problems")

CONTENT_TYPE = "application/problem+json"


class ProblemError(BaseModel):
    """One thing that is wrong in the request."""

    pointer: str = Field(description="JSON pointer into the body, or /query/NAME")
    message: str
    code: str
    suggestion: str | None = None
    line: int | None = Field(default=None, description="line of the data file, from 1")


class ProblemDetails(BaseModel):
    """RFC 9457 problem details."""

    type: str = Field(examples=["/problems/spec-invalid"])
    title: str
    status: int
    detail: str
    instance: str | None = None
    request_id: str | None = Field(default=None, description="by which the server's log has it")
    errors: list[ProblemError] | None = None


class Problem(Exception):
    """An error to be told to the caller; `extra` members are put beside the standard ones."""

    def __init__(
        self,
        status: int,
        slug: str,
        title: str,
        detail: str,
        *,
        errors: Sequence[ProblemError] = (),
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.slug = slug
        self.title = title
        self.detail = detail
        self.errors = list(errors)
        self.headers = dict(headers or {})
        self.extra = extra


def not_found(what: str, identifier: str) -> Problem:
    """404 for a thing that does not exist or that this key may not see: the two look the same."""
    return Problem(404, "not-found", "Not found", f"There is no {what} {identifier!r}.")


def conflict(slug: str, detail: str, **extra: Any) -> Problem:
    """409: the request is right, but not in the present state."""
    return Problem(409, slug, "Conflict with the present state", detail, **extra)


def database_problem(error: Exception) -> Problem | None:
    """503 for an error that says that the database is away; None for any other error. Logs it."""
    if not isinstance(error, OperationalError | PoolTimeout | psycopg.OperationalError):
        return None
    cause = error.orig if isinstance(error, DBAPIError) else error
    log.error("the database is unavailable: %s", cause)
    return Problem(
        503,
        "database-unavailable",
        "Database unavailable",
        "The database cannot be reached now. What this request was to change may have been "
        "changed all the same. Try again shortly.",
        headers={"Retry-After": "2"},
    )


def internal_error(error: Exception) -> Problem:
    """500 for an error that nothing handled. The log has it; the answer tells nothing of it."""
    # Of an error of the database not the statement's values, which are the caller's.
    cause = error.orig if isinstance(error, DBAPIError) else error
    log.error("unhandled error: %s", cause, exc_info=error)
    return Problem(
        500,
        "internal-error",
        "Internal error",
        "The service made an error; its log has the details.",
    )


def response(request: Request, problem: Problem) -> JSONResponse:
    """Render a problem."""
    body: dict[str, Any] = {
        "type": f"/problems/{problem.slug}",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "instance": request.url.path,
        "request_id": request.scope.get("state", {}).get("request_id"),
        **problem.extra,
    }
    if problem.errors:
        body["errors"] = [e.model_dump(exclude_none=True) for e in problem.errors]
    return JSONResponse(
        clean(body), status_code=problem.status, headers=problem.headers, media_type=CONTENT_TYPE
    )


def _pointer(location: Sequence[int | str]) -> str:
    parts = location[1:] if location and location[0] == "body" else location
    return "".join("/" + str(p).replace("~", "~0").replace("/", "~1") for p in parts)


def _said(error: Mapping[str, Any]) -> str:
    if tuple(error["loc"]) == ("body",) and error["type"] == "missing":
        return "the body is empty; this route reads JSON"
    return str(error["msg"])


def _methods_at(app: FastAPI, path: str) -> list[str]:
    """What the resource at this path takes: the framework names one route's methods alone."""
    template, found = None, set[str]()
    for context in iter_route_contexts(app.routes):
        methods = getattr(context.original_route, "methods", None)
        if not methods or context.path is None:
            continue
        if template is None and compile_path(context.path)[0].match(path):
            template = context.path
        if context.path == template:
            found |= methods
    return sorted(found)


# Statuses that have one kind only are told by it; those with several by what raised the problem.
_BY_STATUS = {
    400: "bad-request",
    404: "not-found",
    405: "method-not-allowed",
    406: "not-acceptable",
    413: "body-too-large",
    415: "unsupported-media-type",
    416: "range-not-satisfiable",
}


def install(app: FastAPI) -> None:
    """Make every error of the application a problem document."""

    @app.exception_handler(Problem)
    async def _problem(request: Request, error: Problem) -> JSONResponse:
        return response(request, error)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        kind = KINDS[_BY_STATUS.get(error.status_code, "http-error")]
        if error.status_code == 404:
            detail = f"There is nothing at {request.url.path}."
        elif error.status_code == 405:
            detail = f"{request.method} is not offered at {request.url.path}."
        else:
            detail = str(error.detail)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods_at(app, request.url.path))
        return response(
            request,
            Problem(error.status_code, kind.name, kind.title, detail, headers=headers),
        )

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = [
            ProblemError(pointer=_pointer(e["loc"]), message=_said(e), code=str(e["type"]))
            for e in error.errors()
        ]
        detail = f"{len(errors)} values of the request are not valid."
        if len(errors) == 1:
            pointer = errors[0].pointer
            detail = f"{pointer}: {errors[0].message}" if pointer else errors[0].message
        problem = Problem(422, "request-invalid", "Request not valid", detail, errors=errors)
        return response(request, problem)

    @app.exception_handler(OperationalError)
    @app.exception_handler(PoolTimeout)
    @app.exception_handler(psycopg.OperationalError)
    async def _database(request: Request, error: Exception) -> JSONResponse:
        problem = database_problem(error)
        assert problem is not None
        return response(request, problem)

    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: ClientDisconnect) -> Response:
        # Nobody reads this; without a handler it would be logged as an error of the service.
        return Response(status_code=400)
