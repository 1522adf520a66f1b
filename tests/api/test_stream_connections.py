"""Live streams over real connections: what comes is handed on at once, and never out of order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from octrain_api.connections import BodyOffer
from octrain_api.server import make_server
from tests.api.live import Told, parse


@pytest.fixture
async def port(lone_service: Any) -> AsyncIterator[int]:
    """The application behind its own HTTP server."""
    server = make_server(lone_service.app, lone_service.settings.http, "127.0.0.1", 0)
    server.config.lifespan = "off"
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done()
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


class Client:
    """Reads a stream as HTTP chunks, while it may; `text` is what came so far."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.text = ""
        self.taking = asyncio.Event()
        self.taking.set()
        self._reader, self._writer = reader, writer
        self._came = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert b" 200 OK\r\n" in head
        assert b"transfer-encoding: chunked" in head
        while True:
            await self.taking.wait()
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            body = await self._reader.readexactly(size + 2)
            assert body[size:] == b"\r\n"
            self.text += body[:size].decode()
            self._came.set()
            if not size:
                return

    async def until(self, true: Callable[[list[Told]], Any]) -> list[Told]:
        """The messages once they are as wanted."""
        async with asyncio.timeout(60):
            while not true(parse(self.text)):
                assert not self._task.done() or self._task.result() is None
                await self._came.wait()
                self._came.clear()
        return parse(self.text)

    async def until_lines(self, count: int) -> None:
        """Return when so many log lines have come."""
        async with asyncio.timeout(60):
            while self.text.count("event: log\n") < count:
                await self._came.wait()
                self._came.clear()

    async def close(self) -> None:
        self._task.cancel()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


@pytest.fixture
async def connect(port: int, lone_service: Any, running_job: str) -> AsyncIterator[Any]:
    """A function that opens streams of the running job."""
    key = await lone_service.key("ada", "jobs:read")
    clients: list[Client] = []

    async def open_one(query: str = "", buffer: int | None = None) -> Client:
        plain = socket.socket()
        if buffer is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=plain, limit=4096)
        path = f"/v1/jobs/{running_job}/stream{query}"
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
        writer.write(request.encode())
        clients.append(Client(reader, writer))
        return clients[-1]

    yield open_one
    for client in clients:
        await client.close()


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each part that was offered to a connection was taken."""
    answers: list[bool] = []
    offer = BodyOffer.__call__

    def noted(self: BodyOffer, body: bytes) -> bool:
        answers.append(offer(self, body))
        return answers[-1]

    monkeypatch.setattr(BodyOffer, "__call__", noted)
    return answers


def caught_up(told: list[Told]) -> bool:
    return any(one.event == "progress" for one in told)


def lines_of(told: list[Told]) -> list[str]:
    return [one.data["text"] for one in told if one.event == "log"]


def log(text: str) -> dict[str, Any]:
    return {"type": "log", "stream": "stdout", "time": 1.5, "text": text}


async def following(service: Any, count: int) -> None:
    """Return when so many readers wait for what comes next."""
    async with asyncio.timeout(60):
        while True:
            parts = service.app.state.context.streams._parts.values()
            if sum(len(running.part.ring._followers) for running in parts) == count:
                return
            await asyncio.sleep(0.01)


async def test_who_is_up_to_date_is_told_without_waking_its_task(
    connect: Any, worker: Any, lone_service: Any, offers: list[bool]
) -> None:
    everything = [await connect() for _ in range(20)]
    some = [await connect("?include=logs") for _ in range(5)]
    for client in everything:
        await client.until(caught_up)
    await following(lone_service, 25)
    assert offers == []
    await worker.telemetry(3, log("first"))
    for client in everything + some:
        await client.until(lambda told: lines_of(told) == ["first"])
    # One or another may just have been writing its sign of life.
    assert len(offers) > 12
    assert all(offers)
    await following(lone_service, 25)
    # Who has gone is missed by nobody.
    await everything.pop().close()
    for number in range(5):
        await worker.telemetry(4 + number, log(f"line {number}"))
    wanted = ["first", *(f"line {number}" for number in range(5))]
    for client in everything + some:
        told = await client.until(lambda told: len(lines_of(told)) == 6)
        assert lines_of(told) == wanted
    ids = [int(one.id) for one in parse(everything[0].text) if one.id]
    assert ids == list(range(1, ids[-1] + 1))


async def test_a_connection_that_takes_nothing_is_told_later_and_in_order(
    connect: Any, worker: Any, lone_service: Any, offers: list[bool]
) -> None:
    slow, quick = await connect(buffer=2048), await connect()
    for client in (slow, quick):
        await client.until(caught_up)
    await following(lone_service, 2)
    slow.taking.clear()
    # More than the kernel and the server hold for a connection.
    text, count = "x" * 16_000, 0
    async with asyncio.timeout(120):
        while all(offers):
            records = [log(f"{count + n} {text}") for n in range(20)]
            assert (await worker.telemetry(3 + count, *records)).status_code == 200
            count += len(records)
            await quick.until_lines(count)
    slow.taking.set()
    for client in (slow, quick):
        told = await client.until(lambda told: len(lines_of(told)) == count)
        assert [line.split()[0] for line in lines_of(told)] == [str(n) for n in range(count)]
    await worker.finish("succeeded", "completed")
    for client in (slow, quick):
        told = await client.until(lambda told: told[-1].event == "end")
        assert [one.event for one in told].count("end") == 1
