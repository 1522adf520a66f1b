"""Around every request: its id, its line in the log, its figures, its place in the audit log."""

import logging
import time
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octrain_api.observability.context import Work, begun, request_id_from
from octrain_api.observability.measures import Measures
from octrain_api.observability.tracing import Tracing, sane_traceparent
from octrain_api.problems import Problem, internal_error, response
from octrain_api.settings import LogSettings

log = logging.getLogger("octrain_api.requests")

# Called once the answer has been sent, with its status.
Afterwards = Callable[[Request, int], Awaitable[None]]


def route_of(scope: Scope) -> str:
    """The template of the route that answered, without `/v1`; `unmatched` for none."""
    path = getattr(scope.get("route"), "path", None)
    return str(path).removeprefix("/v1") or "/" if path is not None else "unmatched"


class RequestObserver:
    """The outermost layer of ours: errors that nothing handled become problems here."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: LogSettings,
        measures: Measures,
        tracing: Tracing,
        afterwards: Afterwards,
    ) -> None:
        self._app = app
        self._tracing = tracing
        self._logged = settings.requests
        self._measures = measures
        self._afterwards = afterwards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and note it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1") or None
        work = Work(request_id=request_id_from(given), scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"] = work.request_id
        status = 0

        async def answering(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [
                    (b"x-request-id", work.request_id.encode()),
                    # No browser may take what jobs made for a page of this service.
                    (b"x-content-type-options", b"nosniff"),
                ]
                added += state.get("rate_limit_headers", ())
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        began = time.perf_counter()
        parent = sane_traceparent(headers.get(b"traceparent", b"").decode("latin-1"))
        with (
            begun(work),
            self._measures.serving(),
            self._tracing.span(scope["method"], parent) as span,
        ):
            work.traceparent = span.traceparent
            try:
                await self._app(scope, receive, answering)
            except Exception as error:
                if status == 0:
                    await self._failed(error)(scope, receive, answering)
                elif not isinstance(error, ClientDisconnect):
                    log.exception("an answer broke off: %s", error)
                    raise
            finally:
                seconds = time.perf_counter() - began
                route = route_of(scope)
                self._measures.served(scope["method"], route, status, seconds)
                self._log(scope, route, status, seconds)
                span.name, span.failed = f"{scope['method']} {route}", status >= 500
                span.attributes |= {
                    "http.request.method": scope["method"],
                    "http.route": route,
                    "http.response.status_code": status,
                    "octrain.request_id": work.request_id,
                }
            if status:
                await self._afterwards(Request(scope), status)

    @staticmethod
    def _failed(error: Exception) -> ASGIApp:
        """The answer to an error that nothing handled: it tells nothing, the log has it all."""
        if isinstance(error, Problem):
            problem = error
        else:
            problem = internal_error(error)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await response(Request(scope), problem)(scope, receive, send)

        return answer

    def _log(self, scope: Scope, route: str, status: int, seconds: float) -> None:
        if self._logged == "none" or (self._logged == "errors" and 0 < status < 400):
            return
        milliseconds = round(seconds * 1000, 1)
        principal = scope["state"].get("principal")
        client = scope.get("client")
        log.info(
            "%s %s %s in %s ms",
            scope["method"],
            route,
            status or "no answer",
            milliseconds,
            extra={
                "fields": {
                    "method": scope["method"],
                    "route": route,
                    "status": status,
                    "milliseconds": milliseconds,
                    "key_id": principal.key_id if principal is not None else None,
                    "owner": principal.owner if principal is not None else None,
                    "address": client[0] if client else None,
                }
            },
        )
