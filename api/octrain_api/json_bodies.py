"""The JSON of request bodies, read once and strictly, before anything is done with it.

What JSON itself leaves open is refused, each with a pointer: a key given twice, of which parsers
take one or the other; numbers that no field can hold; texts that nothing can store.
"""

import re

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as RequestScope

from fp8core.spec import SpecInvalid
from fp8core.spec.document import decode_json, faults_of
from octrain_api.keys.principal import Principal, Scope
from octrain_api.problems import Problem, ProblemError, response

# Their body is a job's spec, and the problem is named by that.
_SPECS = re.compile(r"(/v1)?/jobs(:validate)?")
# Asked without a key; elsewhere who has none is told that first.
_OPEN = re.compile(r"(/v1)?/(session|nodes/enrol)")
# Parts of files, whatever they are called: JSON lines are no JSON.
_FILES = re.compile(r"(/v1)?/datasets/[^/]+/content")
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})


class JsonBodies:
    """Puts the JSON that `RequestGuard` has read whole into `request.state.json`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: RequestScope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse with 422."""
        state = scope.get("state", {})
        body = state.pop("body", None)
        is_read = body and scope["method"] not in _BODILESS and not _FILES.fullmatch(scope["path"])
        if is_read and ("principal" in state or _OPEN.fullmatch(scope["path"])):
            try:
                state["json"] = _read(body, cleaned=_cleans(state.get("principal")))
            except SpecInvalid as error:
                problem = _refusal(error, scope["path"])
                await response(Request(scope), problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _cleans(principal: Principal | None) -> bool:
    """Whether texts are taken as they come: what machines write is cleaned, never refused."""
    return principal is not None and Scope.NODE in principal.scopes


def _read(body: bytes, *, cleaned: bool) -> object:
    value = decode_json(body, "the body")
    # What no text can hold comes by an escape only: raw, it is not JSON or not UTF-8.
    faults = faults_of(value, texts=not cleaned and b"\\u" in body)
    if faults:
        raise SpecInvalid(faults)
    return value


def _refusal(error: SpecInvalid, path: str) -> Problem:
    errors = [
        ProblemError(pointer=p.pointer, message=p.message, code=p.code) for p in error.problems
    ]
    first = error.problems[0]
    detail = f"{first.pointer}: {first.message}" if first.pointer else first.message
    if len(errors) > 1:
        detail = f"{len(errors)} things are wrong."
    if _SPECS.fullmatch(path):
        return Problem(422, "spec-invalid", "The job's spec is not valid", detail, errors=errors)
    return Problem(422, "request-invalid", "Request not valid", detail, errors=errors)
