"""The two thin transports: one that waits, and one for asyncio.

Everything the client does is written once, as coroutines over an ``Exchange``. With the blocking
one they never suspend, so that ``drive`` can run them to their end without an event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import httpx

T = TypeVar("T")


@dataclass(frozen=True)
class Outgoing:
    """A request as it leaves; ``timeout`` None is the client's own."""

    method: str
    url: str
    params: Mapping[str, Any] | None = None
    json: Any = None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: httpx.Timeout | float | None = None


class Body(Protocol):
    """An answer whose body is read as it comes."""

    @property
    def answer(self) -> httpx.Response: ...

    async def read(self) -> None: ...

    def lines(self) -> AsyncGenerator[str, None]: ...

    def chunks(self) -> AsyncGenerator[bytes, None]: ...


class Exchange(Protocol):
    """Sends requests; waits and works the way that its callers can bear."""

    async def send(self, outgoing: Outgoing) -> httpx.Response: ...

    def open(self, outgoing: Outgoing) -> AbstractAsyncContextManager[Body]: ...

    async def sleep(self, seconds: float) -> None: ...

    async def work(self, function: Callable[[], T]) -> T:
        """What a function returns that keeps a processor or a disk busy for long."""
        ...

    async def close(self) -> None: ...


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine over a blocking exchange."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a blocking exchange suspended its caller")


def iterate(items: AsyncIterator[T]) -> Iterator[T]:
    """The items of an asynchronous iterator over a blocking exchange."""

    async def following() -> T:
        return await anext(items)

    try:
        while True:
            try:
                item = drive(following())
            except StopAsyncIteration:
                return
            yield item
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            drive(close())


class BlockingExchange:
    """Over an ``httpx.Client``."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    async def send(self, outgoing: Outgoing) -> httpx.Response:
        return self._http.send(_built(self._http, outgoing))

    @asynccontextmanager
    async def open(self, outgoing: Outgoing) -> AsyncIterator[Body]:
        answer = self._http.send(_built(self._http, outgoing), stream=True)
        try:
            yield _BlockingBody(answer)
        finally:
            answer.close()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def work(self, function: Callable[[], T]) -> T:
        return function()

    async def close(self) -> None:
        self._http.close()


class AsyncExchange:
    """Over an ``httpx.AsyncClient``."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def send(self, outgoing: Outgoing) -> httpx.Response:
        return await self._http.send(_built(self._http, outgoing))

    @asynccontextmanager
    async def open(self, outgoing: Outgoing) -> AsyncIterator[Body]:
        answer = await self._http.send(_built(self._http, outgoing), stream=True)
        try:
            yield _AsyncBody(answer)
        finally:
            await answer.aclose()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def work(self, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function)

    async def close(self) -> None:
        await self._http.aclose()


class _BlockingBody:
    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer

    async def read(self) -> None:
        self.answer.read()

    async def lines(self) -> AsyncGenerator[str, None]:
        for line in self.answer.iter_lines():
            yield line

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for chunk in self.answer.iter_bytes():
            yield chunk


class _AsyncBody:
    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer

    async def read(self) -> None:
        await self.answer.aread()

    async def lines(self) -> AsyncGenerator[str, None]:
        async for line in self.answer.aiter_lines():
            yield line

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self.answer.aiter_bytes():
            yield chunk


def _built(http: httpx.Client | httpx.AsyncClient, outgoing: Outgoing) -> httpx.Request:
    return http.build_request(
        outgoing.method,
        outgoing.url,
        params=outgoing.params,
        json=outgoing.json,
        content=outgoing.content,
        headers=outgoing.headers,
        timeout=outgoing.timeout if outgoing.timeout is not None else httpx.USE_CLIENT_DEFAULT,
    )
