"""Requests to one server: the key, retries, and problem documents as exceptions."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import httpx

from octrain.client.connection import Connection
from octrain.client.errors import OctrainError, ServerUnreachable, exception_for
from octrain.client.http import Body, Exchange, Outgoing
from octrain.client.models import Problem

RETRIES = 3
_RETRIED_STATUSES = frozenset({502, 503, 504})
_LONGEST_PAUSE = 30.0
_PROBLEM_MEMBERS = ("type", "title", "status", "detail", "errors")


class Session:
    """One server, over either exchange.

    Reads, and writes that are as good twice as once, are tried again when the connection breaks or
    the server is unwell; whatever the server refused for its rate limit is sent again when it says.
    """

    def __init__(
        self, connection: Connection, exchange: Exchange, *, retries: int = RETRIES
    ) -> None:
        self.connection = connection
        self.exchange = exchange
        self._retries = retries
        self._answered = False
        self._headers = {"Accept": "application/json"}
        if connection.key:
            self._headers["Authorization"] = f"Bearer {connection.key}"

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        repeatable: bool = False,
    ) -> Any:
        """The decoded JSON answer (None when empty). Errors: OctrainError, ServerUnreachable.

        ``content`` is a body that is no JSON; ``repeatable`` says that twice is as good as once.
        """
        sent = {**self._headers, **(headers or {})}
        repeatable = repeatable or method in ("GET", "DELETE") or "Idempotency-Key" in sent
        outgoing = Outgoing(method, self._url(path), _clean(params), json, content, sent, timeout)
        attempt = 0
        while True:
            last = attempt >= self._retries
            try:
                answer = await self.exchange.send(outgoing)
            except httpx.TransportError as error:
                if last or not self._may_repeat(error, repeatable):
                    raise self._unreachable(error) from error
                await self.exchange.sleep(_pause(attempt, None))
                attempt += 1
                continue
            self._answered = True
            if answer.is_success:
                return _decoded(answer)
            # A refusal for the rate comes before anything is done.
            again = answer.status_code == 429 or _is_in_flight(answer)
            again = again or (repeatable and answer.status_code in _RETRIED_STATUSES)
            if last or not again:
                raise problem_of(answer)
            await self.exchange.sleep(_pause(attempt, _retry_after(answer)))
            attempt += 1

    async def readiness(self) -> Any:
        """What ``/readyz`` says, which is no error when it says that the service is not ready."""
        outgoing = Outgoing("GET", f"{self.connection.url}/readyz", headers=self._headers)
        try:
            answer = await self.exchange.send(outgoing)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        told = _decoded(answer)
        if not answer.is_success and not (isinstance(told, dict) and "checks" in told):
            raise problem_of(answer)
        return told

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        read_timeout: float,
        also: Collection[int] = (),
    ) -> AsyncIterator[Body]:
        """An answer whose body is read as it comes; those with the statuses ``also`` are given too.

        Errors: OctrainError, ServerUnreachable.
        """
        timeout = httpx.Timeout(10.0, read=read_timeout)
        sent = {**self._headers, **(headers or {})}
        outgoing = Outgoing("GET", self._url(path), headers=sent, timeout=timeout)
        try:
            async with self.exchange.open(outgoing) as body:
                self._answered = True
                if not body.answer.is_success and body.answer.status_code not in also:
                    await body.read()
                    raise problem_of(body.answer)
                yield body
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def never_answered(self, error: OctrainError) -> bool:
        """Whether this error says that nothing is there, and nothing ever was."""
        return not self._answered and isinstance(error.__cause__, httpx.ConnectError)

    def _url(self, path: str) -> str:
        return f"{self.connection.url}/v1{path}"

    def _may_repeat(self, error: httpx.TransportError, repeatable: bool) -> bool:
        """Whether to try again. Where nothing has ever answered, waiting would only make a person
        wait; a server that did is probably being started again, and has seen nothing of this."""
        if isinstance(error, httpx.ConnectError):
            return self._answered
        return repeatable

    def _unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        url = self.connection.url
        if isinstance(error, httpx.ConnectError):
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                return ServerUnreachable(
                    f"The certificate of {url} is not trusted: {error}. For an authority "
                    "of your own, name its file in OCTRAIN_CA_FILE."
                )
            hint = (
                "Start it with `octrain up`."
                if self.connection.origin == "the local stack"
                else f"The URL came from {self.connection.origin}. For one of your own, run "
                "`octrain up`."
            )
            return ServerUnreachable(f"No server answers at {url}. {hint}")
        kind = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "hung up"
        return ServerUnreachable(f"The server at {url} {kind} ({error or type(error).__name__}).")


def one_time_key() -> dict[str, str]:
    """The header with which a request that makes something can be sent again safely."""
    return {"Idempotency-Key": uuid.uuid4().hex}


def _is_in_flight(answer: httpx.Response) -> bool:
    """Whether an earlier try of the same request is still being worked on."""
    return answer.status_code == 409 and problem_of(answer).type.endswith(
        "/idempotency-key-in-flight"
    )


def problem_of(answer: httpx.Response) -> OctrainError:
    """The exception for an answer that is no success, with whatever its body tells."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {}
    listed = body.get("errors")
    problems = [
        Problem.model_validate(e)
        for e in (listed if isinstance(listed, list) else [])
        if isinstance(e, dict)
    ]
    title = str(body.get("title") or answer.reason_phrase)
    detail = str(body.get("detail") or f"The server answered {answer.status_code} {title}.")
    if answer.status_code == 401 and "Authorization" not in answer.request.headers:
        detail += " No key was sent: set OCTRAIN_API_KEY."
    kind = str(body.get("type") or "")
    return exception_for(kind, answer.status_code)(
        detail,
        status=answer.status_code,
        title=title,
        type=kind,
        problems=problems,
        members={k: v for k, v in body.items() if k not in _PROBLEM_MEMBERS},
        retry_after=_retry_after(answer),
    )


def with_query(path: str, params: Mapping[str, Any]) -> str:
    """The path with those of the parameters that are given."""
    query = urlencode(_clean(params) or {}, doseq=True)
    return f"{path}?{query}" if query else path


def _decoded(answer: httpx.Response) -> Any:
    if not answer.content:
        return None
    try:
        return answer.json()
    except ValueError:
        raise OctrainError(
            f"{answer.request.url} answered {answer.status_code} with something else than JSON: "
            "is it an Octrain server?",
            status=answer.status_code,
        ) from None


def _clean(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return {k: v for k, v in params.items() if v is not None} if params else None


def _retry_after(answer: httpx.Response) -> float | None:
    told = answer.headers.get("Retry-After", "")
    return float(told) if told.isascii() and told.isdigit() else None


def _pause(attempt: int, retry_after: float | None) -> float:
    """Seconds until the next try: what the server said (bounded), else doubling with jitter."""
    if retry_after is not None:
        return min(retry_after, _LONGEST_PAUSE)
    return float(0.25 * 2**attempt * (0.5 + random.random()))
