"""What no endpoint should have to think of: requests without bound, in any of their parts."""

import re

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octrain_api.json_bounds import too_complex
from octrain_api.problems import Problem, ProblemError, response
from octrain_api.settings import HttpSettings

# Routes whose bodies are bytes, read as they come. Everything else is JSON, and small.
_RAW_PATHS = re.compile(r"^(/v1)?/(datasets/|attempts/[^/]+/telemetry$)")
_RAW_TYPES = frozenset({"application/octet-stream", "application/vnd.octrain.telemetry.v1", ""})


class RequestGuard:
    """Refuses heads, URLs and bodies above their bounds, before anything is parsed.

    Bodies are counted as they come, whatever `Content-Length` says; JSON is bounded in depth and
    in number of values as well.
    """

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is fit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = self._check_head(scope)
            if _has_body(headers):
                receive = await self._bounded(scope, headers, receive)
        except Problem as problem:
            await response(Request(scope), problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_head(self, scope: Scope) -> dict[bytes, bytes]:
        settings = self._settings
        query = scope.get("query_string", b"")
        if "\x00" in scope["path"] or b"%00" in query:
            raise Problem(400, "bad-request", "Bad request", "A URL cannot hold a NUL character.")
        raw_path = scope.get("raw_path") or scope["path"].encode()
        if len(raw_path) + len(query) > settings.max_url_bytes:
            raise Problem(
                414,
                "url-too-long",
                "URL too long",
                f"Path and query have {settings.max_url_bytes} bytes at most, together.",
            )
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if size > settings.max_head_bytes or len(headers) > settings.max_headers:
            raise head_too_large(settings)
        return dict(headers)

    async def _bounded(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive
    ) -> Receive:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise self._too_large()
        media_type = headers.get(b"content-type", b"").decode("latin-1")
        media_type = media_type.partition(";")[0].strip().lower()
        if _RAW_PATHS.match(scope["path"]) and media_type in _RAW_TYPES:
            return self._counting(receive)
        if media_type and media_type != "application/json" and not media_type.endswith("+json"):
            raise Problem(
                415,
                "unsupported-media-type",
                "Unsupported media type",
                f"This route reads application/json, not {media_type[:100]}.",
            )
        return await self._whole(scope, receive)

    def _counting(self, receive: Receive) -> Receive:
        seen = 0

        async def counting() -> Message:
            nonlocal seen
            part = await receive()
            seen += len(part.get("body", b""))
            if seen > self._settings.max_body_bytes:
                raise self._too_large()
            return part

        return counting

    async def _whole(self, scope: Scope, receive: Receive) -> Receive:
        """Reads the JSON to its end and gives it on as one piece."""
        counting = self._counting(receive)
        parts: list[bytes] = []
        more = True
        while more:
            message = await counting()
            if message["type"] != "http.request":
                return _given(message, receive)
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        scope["state"]["body"] = body
        why = too_complex(
            body,
            max_depth=self._settings.max_json_depth,
            max_values=self._settings.max_json_values,
        )
        if why is not None:
            raise Problem(
                422,
                "body-too-complex",
                "Body too complex",
                f"The JSON is not read: {why}.",
                errors=[ProblemError(pointer="", message=why, code="too_complex")],
            )
        return _given({"type": "http.request", "body": body, "more_body": False}, receive)

    def _too_large(self) -> Problem:
        text = f"A request body has {self._settings.max_body_bytes} bytes at most."
        return Problem(413, "body-too-large", "Body too large", text)


def head_too_large(settings: HttpSettings) -> Problem:
    """431, with what is allowed."""
    return Problem(
        431,
        "head-too-large",
        "Request head too large",
        f"The head of a request has {settings.max_head_bytes} bytes and {settings.max_headers} "
        "headers at most.",
    )


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def _given(first: Message, receive: Receive) -> Receive:
    """A receive that gives `first`, and then what comes."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if not given:
            given = True
            return first
        return await receive()

    return replay
