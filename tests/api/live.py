"""Reads live streams of the application as a client would, message by message."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI


@dataclass(frozen=True)
class Told:
    """One message of a stream."""

    id: str | None
    event: str
    data: Any


def parse(text: str) -> list[Told]:
    """The messages of a whole stream; comments and bare ids are left out."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            found.append(Told(fields.get("id"), fields["event"], json.loads(fields["data"])))
    return found


@dataclass
class Listening:
    """An open stream: `text` is what came so far."""

    text: str = ""
    ended: bool = False
    status: int = 0
    # While it is not set the client takes nothing more.
    taking: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def told(self) -> list[Told]:
        """The messages so far."""
        return parse(self.text)

    async def until(self, true: Callable[[list[Told]], Any]) -> list[Told]:
        """The messages once they are as wanted."""
        async with asyncio.timeout(30):
            while not true(self.told):
                await self._came.wait()
                self._came.clear()
        return self.told

    async def until_text(self, part: str) -> None:
        """Return when this has come."""
        async with asyncio.timeout(30):
            while part not in self.text:
                await self._came.wait()
                self._came.clear()

    async def end(self) -> list[Told]:
        """The messages once the stream has ended."""
        async with asyncio.timeout(30):
            while not self.ended:
                await self._came.wait()
                self._came.clear()
        return self.told

    def take(self, message: Any) -> None:
        """What the server sends."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.text += message.get("body", b"").decode()
            self.ended = not message.get("more_body", False)
        self._came.set()


@contextlib.asynccontextmanager
async def listening(
    app: FastAPI, path: str, key: str | None, **headers: str
) -> AsyncIterator[Listening]:
    """A stream that is read while the block runs; leaving the block is the client's going."""
    client = Listening()
    client.taking.set()
    target, _, query = path.partition("?")
    sent = headers if key is None else {"authorization": f"Bearer {key}", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "headers": [(n.replace("_", "-").encode(), v.encode()) for n, v in sent.items()],
        "server": ("octrain", 80),
        "client": ("test", 1),
        "scheme": "http",
        "root_path": "",
    }

    async def receive() -> Any:
        await client.gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await client.taking.wait()
        client.take(message)

    task = asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.gone.set()
        client.taking.set()
        async with asyncio.timeout(30):
            await task
