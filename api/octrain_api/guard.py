"""What no endpoint should have to think of: bodies without bound, and NUL characters."""

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octrain_api.problems import Problem, response


class RequestGuard:
    """Refuses bodies above a bound (413), by their length or by counting, and NUL in URLs (400)."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is fit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "\x00" in scope["path"] or b"%00" in scope.get("query_string", b""):
            problem = Problem(
                400, "bad-request", "Bad request", "A URL cannot hold a NUL character."
            )
            await response(Request(scope), problem)(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_bytes:
            await response(Request(scope), self._too_large())(scope, receive, send)
            return
        seen = 0

        async def counting() -> Message:
            nonlocal seen
            part = await receive()
            seen += len(part.get("body", b""))
            if seen > self._max_bytes:
                raise self._too_large()
            return part

        await self._app(scope, counting, send)

    def _too_large(self) -> Problem:
        text = f"A request body has {self._max_bytes} bytes at most."
        return Problem(413, "body-too-large", "Body too large", text)
