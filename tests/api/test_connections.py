"""Clients that are slow, endless or never read, over real sockets to a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.api.sockets import PATIENCE, Start, plant_long_events


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, headers and problem document of an answer that ends the connection."""
    data = await asyncio.wait_for(reader.read(), PATIENCE)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
    assert headers["content-type"] == "application/problem+json"
    assert int(headers["content-length"]) == len(body)
    return int(lines[0].split()[1]), headers, json.loads(body)


async def _drip(writer: asyncio.StreamWriter, data: bytes, pause: float) -> None:
    """Send byte after byte, until the other side has had enough."""
    with contextlib.suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(pause)


async def test_a_head_that_drips_is_answered_with_408(start: Start) -> None:
    async with start(head_timeout=0.5) as server:
        reader, writer = await server.connect()
        drip = asyncio.create_task(
            _drip(writer, b"GET /healthz HTTP/1.1\r\nX-A: " + b"a" * 9999, 0.05)
        )
        status, headers, problem = await _answer(reader)
        assert (status, problem["type"]) == (408, "/problems/request-timeout")
        assert headers["connection"] == "close"
        drip.cancel()
        writer.close()


async def test_a_connection_that_says_nothing_is_closed(start: Start) -> None:
    async with start(head_timeout=0.3) as server:
        reader, writer = await server.connect()
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()


async def test_a_body_that_drips_is_answered_with_408(start: Start, service: Any) -> None:
    user = await service.key("slow", "jobs:write")
    async with start(body_grace=0.5, min_body_rate=100_000) as server:
        reader, writer = await server.connect()
        writer.write(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n"
            + f"Authorization: Bearer {user}\r\n\r\n".encode()
        )
        drip = asyncio.create_task(_drip(writer, b"{" * 9999, 0.05))
        status, _, problem = await _answer(reader)
        assert (status, problem["type"]) == (408, "/problems/request-timeout")
        drip.cancel()
        writer.close()


async def test_a_body_at_the_least_rate_is_taken(start: Start, service: Any, spec: Any) -> None:
    """Ten times as slow as the grace alone allows, but its bytes buy the time."""
    key = await service.key("steady", "jobs:write")
    body = json.dumps(spec | {"notes": "n" * 4000}).encode()
    async with start(body_grace=0.2, min_body_rate=500) as server:
        reader, writer = await server.connect()
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
        began = time.monotonic()
        for start_at in range(0, len(body), 400):
            writer.write(body[start_at : start_at + 400])
            await writer.drain()
            await asyncio.sleep(0.1)
        assert time.monotonic() - began > 0.4
        assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 201")
        writer.close()


async def test_a_head_without_end_is_not_collected(start: Start) -> None:
    async with start(max_head_bytes=2000) as server:
        reader, writer = await server.connect()
        writer.write(b"GET /healthz HTTP/1.1\r\nX-Long: ")
        for _ in range(5):
            writer.write(b"a" * 1000)
            await asyncio.sleep(0)
        status, _, problem = await _answer(reader)
        assert (status, problem["type"]) == (431, "/problems/head-too-large")
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status", "name"),
    [
        (b"NOT HTTP\r\n\r\n", 400, "bad-request"),
        (b"GET /healthz HTTP/1.1\r\n" + b"X-A: b\r\n" * 200 + b"\r\n", 431, "head-too-large"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nConnection: close\r\n\r\n", 414, "url-too-long"),
        (
            b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 99999999\r\nConnection: close\r\n\r\n",
            413,
            "body-too-large",
        ),
        (
            b"POST /v1/jobs HTTP/1.1\r\nConnection: close\r\nContent-Type: text/csv\r\n"
            b"Content-Length: 1\r\n\r\na",
            415,
            "unsupported-media-type",
        ),
        (
            b"POST /v1/jobs HTTP/1.1\r\nConnection: close\r\nContent-Length: 4000\r\n\r\n"
            + b"[" * 4000,
            422,
            "body-too-complex",
        ),
    ],
)
async def test_what_is_out_of_bounds_is_a_problem(
    start: Start, request_bytes: bytes, status: int, name: str
) -> None:
    async with start() as server:
        reader, writer = await server.connect()
        if b"Connection" not in request_bytes:
            request_bytes = request_bytes.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        writer.write(request_bytes)
        found, _, problem = await _answer(reader)
        assert (found, problem["type"], problem["status"]) == (status, f"/problems/{name}", status)
        writer.close()


async def test_chunks_beyond_the_bound_are_refused(start: Start) -> None:
    async with start(max_body_bytes=2000) as server:
        reader, writer = await server.connect()
        writer.write(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        line = await asyncio.wait_for(reader.readline(), PATIENCE)
        assert line.startswith(b"HTTP/1.1 413")
        writer.close()


async def test_one_connection_too_many(start: Start) -> None:
    async with start(max_connections=2) as server:
        held = [await server.connect() for _ in range(2)]
        for _, writer in held:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        for reader, _ in held:
            assert b"200" in await asyncio.wait_for(reader.readline(), PATIENCE)
        reader, writer = await server.connect()
        status, headers, problem = await _answer(reader)
        assert (status, problem["type"]) == (503, "/problems/overloaded")
        assert headers["retry-after"]
        for _, each in [*held, (reader, writer)]:
            each.close()


async def test_a_stream_that_nobody_reads_is_cut(
    start: Start, service: Any, submit: Any, tmp_path: Path
) -> None:
    user = await service.user("reader")
    job_id = await submit(user)
    # More than the kernel keeps for a reader: 32 MB of events.
    await plant_long_events(service, job_id, 500)
    key = user.headers["Authorization"]
    async with start(write_timeout=0.5) as server:
        reader, writer = await server.connect(receive_bytes=4096)
        request = (
            f"GET /v1/jobs/{job_id}/stream HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n\r\n"
        )
        writer.write(request.encode())
        assert b"200" in await asyncio.wait_for(reader.readline(), PATIENCE)
        async with asyncio.timeout(PATIENCE):
            while await server.connections():
                await asyncio.sleep(0.05)
        writer.transport.abort()


async def test_a_reader_that_pauses_is_not_cut(start: Start, service: Any, submit: Any) -> None:
    user = await service.user("pauser")
    job_id = await submit(user)
    key = user.headers["Authorization"]
    async with start(write_timeout=0.3, head_timeout=0.3) as server:
        reader, writer = await server.connect()
        request = (
            f"GET /v1/jobs/{job_id}/stream HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n\r\n"
        )
        writer.write(request.encode())
        await asyncio.wait_for(reader.readuntil(b"queued"), PATIENCE)
        await asyncio.sleep(0.8)
        await user.post(f"/jobs/{job_id}/cancel")
        assert await asyncio.wait_for(reader.readuntil(b"event: end"), PATIENCE)
        writer.close()
