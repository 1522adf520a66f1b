"""Requests to the server: the key, retries, and problem documents as exceptions."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import httpx

from octrain.client.connection import Connection
from octrain.client.errors import OctrainError, ServerUnreachable
from octrain.client.models import Problem

RETRIES = 3
_RETRIED_STATUSES = frozenset({429, 502, 503, 504})


class Transport:
    """One server. Reads, and writes with an idempotency key, are tried again when the connection
    breaks or the server says to come back later.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        timeout: float,
        http: httpx.Client | None = None,
    ) -> None:
        self.connection = connection
        headers = {"Accept": "application/json"}
        if connection.key:
            headers["Authorization"] = f"Bearer {connection.key}"
        self._headers = headers
        self._own = http is None
        self._http = http or httpx.Client(timeout=timeout, follow_redirects=False)

    def close(self) -> None:
        if self._own:
            self._http.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """The decoded JSON answer (None when empty). Errors: OctrainError, ServerUnreachable."""
        sent = {**self._headers, **(headers or {})}
        repeatable = method in ("GET", "DELETE") or "Idempotency-Key" in sent
        for attempt in range(RETRIES + 1):
            last = attempt == RETRIES or not repeatable
            try:
                answer = self._http.request(
                    method,
                    self._url(path),
                    json=json,
                    params=_clean(params),
                    headers=sent,
                    timeout=timeout if timeout is not None else httpx.USE_CLIENT_DEFAULT,
                )
            except httpx.TransportError as error:
                # Nothing listens there: waiting would only make a person wait.
                if last or isinstance(error, httpx.ConnectError):
                    raise self._unreachable(error) from error
                time.sleep(_pause(attempt, None))
                continue
            if answer.status_code in _RETRIED_STATUSES and not last:
                time.sleep(_pause(attempt, answer.headers.get("Retry-After")))
                continue
            if answer.is_success:
                return _decoded(answer)
            raise problem_of(answer)
        raise AssertionError("unreachable: the last attempt returns or raises")

    @contextmanager
    def stream(
        self,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        read_timeout: float,
    ) -> Iterator[httpx.Response]:
        """An answer whose body is read as it comes. Errors: OctrainError, ServerUnreachable."""
        timeout = httpx.Timeout(10.0, read=read_timeout)
        sent = {**self._headers, **(headers or {})}
        try:
            with self._http.stream("GET", self._url(path), headers=sent, timeout=timeout) as answer:
                if not answer.is_success:
                    answer.read()
                    raise problem_of(answer)
                yield answer
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _url(self, path: str) -> str:
        return f"{self.connection.url}/v1{path}"

    def _unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        url = self.connection.url
        if isinstance(error, httpx.ConnectError):
            hint = (
                "Start it with `octrain up`."
                if self.connection.origin == "the local stack"
                else f"The URL came from {self.connection.origin}."
            )
            return ServerUnreachable(f"No server answers at {url}. {hint}")
        kind = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "hung up"
        return ServerUnreachable(f"The server at {url} {kind} ({error or type(error).__name__}).")


def problem_of(answer: httpx.Response) -> OctrainError:
    """The exception for an answer that is no success, with whatever its body tells."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {}
    listed = body.get("errors")
    problems = [Problem.model_validate(e) for e in listed or [] if isinstance(e, dict)]
    title = str(body.get("title") or answer.reason_phrase)
    detail = str(body.get("detail") or f"The server answered {answer.status_code} {title}.")
    if answer.status_code == 401 and "Authorization" not in answer.request.headers:
        detail += " No key was sent: set OCTRAIN_API_KEY."
    return OctrainError(
        detail,
        status=answer.status_code,
        title=title,
        type=str(body.get("type") or ""),
        problems=problems,
    )


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


def with_query(path: str, params: Mapping[str, Any]) -> str:
    """The path with those of the parameters that are given."""
    query = urlencode(_clean(params) or {})
    return f"{path}?{query}" if query else path


def _clean(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return {k: v for k, v in params.items() if v is not None} if params else None


def _pause(attempt: int, retry_after: str | None) -> float:
    """Seconds until the next try: what the server said (bounded), else doubling with jitter."""
    if retry_after is not None and retry_after.isdigit():
        return min(float(retry_after), 30.0)
    return float(0.25 * 2**attempt * (0.5 + random.random()))
