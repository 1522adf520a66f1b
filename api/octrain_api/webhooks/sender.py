"""One HTTP POST to an endpoint of a user, which may be slow, broken or hostile.

The name is resolved here, every address is judged, and the request goes to an address that passed:
written as a literal, so that nothing can be resolved a second time. TLS still proves the name.
"""

import asyncio
import contextlib
import email.utils
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from octrain_api.settings import WebhookSettings
from octrain_api.webhooks.addresses import is_allowed

Resolve = Callable[[str, int], Awaitable[list[str]]]

_EXCERPT_BYTES = 2048
# How long the body of an answer is waited for: its status has been decided by then.
_EXCERPT_SECONDS = 2.0


class AddressRefused(Exception):
    """The name stands for no address that may be connected to."""


@dataclass(frozen=True)
class Outcome:
    """How one attempt went. `status` is None when no answer came, and then `error` says why."""

    status: int | None
    duration_ms: int
    error: str | None = None
    excerpt: str = ""
    retry_after: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the endpoint took the message."""
        return self.status is not None and 200 <= self.status < 300


class Sender:
    """Sends from one event loop; close it there."""

    def __init__(self, settings: WebhookSettings, resolve: Resolve | None = None) -> None:
        self._settings = settings
        # It would log every URL, and with it the tokens that users put there.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._threads = ThreadPoolExecutor(2 * settings.concurrency, "webhook-dns")
        self._resolve = resolve or self._resolve_in_thread
        context = ssl.create_default_context(cafile=settings.ca_file)
        self._client = httpx.AsyncClient(
            verify=context,
            trust_env=False,
            follow_redirects=False,
            timeout=settings.timeout,
            # No connection is used twice: it belongs to an address, and the certificate that it
            # was opened with need not be that of the next name at the same address.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        """Give up what is open."""
        await self._client.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Outcome:
        """Send once. Never raises for what the other side does."""
        began = time.monotonic()

        def after(error: str) -> Outcome:
            return Outcome(None, round((time.monotonic() - began) * 1000), error)

        try:
            async with asyncio.timeout(self._settings.timeout):
                answer = await self._answer(httpx.URL(url), body, headers)
        except (TimeoutError, httpx.TimeoutException):
            return after(f"no answer within {self._settings.timeout:g} s")
        except AddressRefused as error:
            return after(str(error))
        except socket.gaierror as error:
            return after(f"the name cannot be resolved: {error.strerror}")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return after(f"{type(error).__name__}: {error}"[:500])
        duration = round((time.monotonic() - began) * 1000)
        try:
            return Outcome(
                status=answer.status_code,
                duration_ms=duration,
                error=_why(answer),
                excerpt=await _excerpt(answer),
                retry_after=_retry_after(answer.headers.get("retry-after")),
            )
        finally:
            await answer.aclose()

    async def _answer(
        self, url: httpx.URL, body: bytes, headers: Mapping[str, str]
    ) -> httpx.Response:
        """The beginning of an answer: status and headers; the caller closes it."""
        if url.scheme != "https" and not (url.scheme == "http" and self._settings.allow_http):
            raise AddressRefused(f"{url.scheme}:// is not allowed by this server; use https://")
        port = url.port or (443 if url.scheme == "https" else 80)
        host = url.raw_host.decode("ascii")
        addresses = [
            address
            for address in await self._resolve(host, port)
            if is_allowed(address, self._settings.allowed_networks)
        ]
        if not addresses:
            raise AddressRefused(
                f"{host} is not at a public address, and this server allows no other"
            )
        last: httpx.ConnectError | None = None
        for address in addresses:
            request = self._client.build_request(
                "POST",
                url.copy_with(host=address),
                content=body,
                headers={**headers, "Host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": host},
            )
            try:
                return await self._client.send(request, stream=True)
            except httpx.ConnectError as error:
                last = error
        assert last is not None
        raise last

    async def _resolve_in_thread(self, host: str, port: int) -> list[str]:
        """The addresses of a name, without a place in the threads that others need."""

        def look_up() -> list[str]:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))

        return await asyncio.get_running_loop().run_in_executor(self._threads, look_up)


def _why(answer: httpx.Response) -> str | None:
    if answer.is_success:
        return None
    if answer.is_redirect:
        return f"HTTP {answer.status_code}: redirects are not followed; change the webhook's URL"
    return f"HTTP {answer.status_code}"


async def _excerpt(answer: httpx.Response) -> str:
    """The first bytes of the body as they came over the wire: never unpacked, never all read."""
    taken = b""
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(_EXCERPT_SECONDS):
            async for chunk in answer.aiter_raw():
                taken += chunk
                if len(taken) >= _EXCERPT_BYTES:
                    break
    return taken[:_EXCERPT_BYTES].decode("utf-8", "replace").replace("\x00", "�")


def _retry_after(value: str | None) -> float | None:
    """Seconds until the time that Retry-After names (RFC 9110 10.2.3); None for anything else."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value[:20])
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max((moment - datetime.now(UTC)).total_seconds(), 0.0)
