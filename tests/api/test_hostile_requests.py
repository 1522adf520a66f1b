"""Requests that no honest client sends, byte by byte: each is refused, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from octrain_api.streaming import reader as stream_reader
from tests.api.sockets import PATIENCE, Running, Start, plant_long_events

_POST = b"POST /v1/jobs?draft=true HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n"
_GET = b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n"
_HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"

# What is sent, and how it is answered: by one of these statuses, all of them refusals.
REFUSED: dict[str, tuple[bytes, set[int]]] = {
    "a length and chunks": (
        _POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + _HEALTH,
        {400},
    ),
    "chunks and a length": (
        _POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + _HEALTH,
        {400},
    ),
    "two lengths": (_POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x", {400}),
    "a negative length": (_POST + b"Content-Length: -5\r\n\r\n", {400}),
    "a length with a sign": (_POST + b"Content-Length: +2\r\n\r\n{}", {400}),
    "a length of 26 digits": (_POST + b"Content-Length: " + b"9" * 26 + b"\r\n\r\n", {400}),
    "an unknown coding": (_POST + b"Transfer-Encoding: gzip\r\n\r\nabc", {400}),
    "a coding after chunked": (
        _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        {400},
    ),
    "a chunk without a size": (_CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", {400}),
    "a chunk of 2**68 bytes": (_CHUNKED + b"fffffffffffffffff1\r\n{}\r\n0\r\n\r\n", {400}),
    "a chunk of less than nothing": (_CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n", {400}),
    "a chunk longer than it said": (_CHUNKED + b"1\r\n{}{}{}\r\n0\r\n\r\n", {400}),
    "trailers without end": (
        _CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X-T: y\r\n" * 20_000 + b"\r\n",
        {400, 422, 431},
    ),
    "a space in a header's name": (b"GET /healthz HTTP/1.1\r\nHost : x\r\n\r\n", {400}),
    "NUL in a header": (_HEALTH + b"X-A: a\x00b\r\n\r\n", {400}),
    "a folded header": (_HEALTH + b"X-A: a\r\n b\r\n\r\n", {400}),
    "carriage returns alone": (b"GET /healthz HTTP/1.1\rHost: x\r\r\r\n\r\n", {400}),
    "bytes in a path": (b"GET /v1/jobs/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", {400}),
    "NUL in a path": (b"GET /v1/jobs/%00 HTTP/1.1\r\nHost: x\r\n\r\n", {400}),
    "NUL in a query": (_GET.replace(b"jobs", b"jobs?label.%00=a") + b"\r\n", {400}),
    "a path above the root": (b"GET /v1/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", {404}),
    "a proxy's method": (b"CONNECT evil:443 HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404, 405}),
    "an echo": (b"TRACE /healthz HTTP/1.1\r\nHost: x\r\nCookie: a=b\r\n\r\n", {400, 405}),
    "an unheard-of method": (b"BREW /healthz HTTP/1.1\r\nHost: x\r\n\r\n", {400, 405}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    "TLS": (bytes.fromhex("1603010200010001fc0303") + b"\x00" * 300 + b"\r\n\r\n", {400}),
    "an unheard-of version": (b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n", {400}),
    "a key of bytes": (_GET.replace(b"KEY", b"\xff\xfe\xc3") + b"\r\n", {401}),
    "a cookie of bytes": (
        b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nCookie: octrain_session=\xff\xfe; =; ;;a\r\n\r\n",
        {400, 401},
    ),
    "a type of bytes": (
        _POST + b"Content-Type: \xff/\xfe;;;=\r\nContent-Length: 2\r\n\r\n{}",
        {415},
    ),
    "an id of bytes": (
        _GET.replace(b"jobs", b"events/stream") + b"Last-Event-ID: \xff\r\n\r\n",
        {422},
    ),
}
# What is odd, and yet means something: it is answered as if it were not odd.
TAKEN: dict[str, bytes] = {
    "no WebSocket is spoken": _HEALTH
    + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n",
    "no h2c is spoken": _HEALTH + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "tags of bytes": _GET + b'If-None-Match: \xff,W/,"""\r\n\r\n',
    "a trace of bytes": _GET + b"traceparent: \xff00-0\r\n\r\n",
    "an id of a script": _HEALTH + b"X-Request-ID: <script>\r\n\r\n",
    "no text in a query": _GET.replace(b"jobs", b"jobs?name=%ff%ed%a0%80") + b"\r\n",
    "a body that is not asked for": _GET + b'Content-Length: 5\r\n\r\n{"a":',
}


async def _status(reader: asyncio.StreamReader) -> int:
    line = await asyncio.wait_for(reader.readline(), PATIENCE)
    assert line.startswith(b"HTTP/1.1 "), line
    return int(line[9:12])


async def _body(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer whose status line is read."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return await asyncio.wait_for(reader.readexactly(length), PATIENCE)


async def _lives(server: Running) -> None:
    reader, writer = await server.connect()
    writer.write(_HEALTH + b"\r\n")
    assert await _status(reader) == 200
    assert json.loads(await _body(reader)) == {"status": "ok"}
    writer.close()


async def test_what_is_no_request_is_refused(start: Start, service: Any) -> None:
    key = (await service.key("hostile", "jobs:read", "jobs:write")).encode()
    async with start() as server:
        for what, (sent, statuses) in REFUSED.items():
            reader, writer = await server.connect()
            writer.write(sent.replace(b"KEY", key))
            assert await _status(reader) in statuses, what
            problem = json.loads(await _body(reader))
            assert problem["type"].startswith("/problems/"), what
            assert b"healthz" not in await _rest(reader, writer), what
        await _lives(server)
    assert (await (await service.user("hostile")).get("/jobs")).json()["items"] == []


async def _rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What else came for a request, once the connection is given up."""
    if writer.can_write_eof() and not writer.is_closing():
        try:
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), PATIENCE)
        except OSError:
            pass  # ended by the other side
        finally:
            writer.close()
    return b""


@pytest.mark.parametrize("what", TAKEN)
async def test_what_is_odd_is_harmless(start: Start, service: Any, what: str) -> None:
    key = (await service.key("odd", "jobs:read")).encode()
    async with start() as server:
        reader, writer = await server.connect()
        writer.write(TAKEN[what].replace(b"KEY", key))
        assert await _status(reader) == 200
        assert b"<script>" not in await _body(reader)
        writer.close()


@pytest.mark.parametrize("begun", [_CHUNKED + b"ff\r\n{}", _POST + b"Content-Length: 99\r\n\r\n{}"])
async def test_a_body_that_breaks_off_makes_nothing(
    start: Start, service: Any, begun: bytes
) -> None:
    user = await service.user("broken")
    key = (await service.key("broken", "jobs:write")).encode()
    async with start() as server:
        reader, writer = await server.connect()
        writer.write(begun.replace(b"KEY", key))
        writer.write_eof()
        assert b" 201 " not in await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        await _lives(server)
    assert (await user.get("/jobs")).json()["items"] == []


async def test_a_pipeline_is_answered_in_its_order(
    start: Start, service: Any, spec: dict[str, Any]
) -> None:
    key = (await service.key("pipeline", "jobs:read", "jobs:write")).encode()
    bodies = [json.dumps(spec | {"name": f"job {n}"}).encode() for n in range(8)]
    post = _POST.replace(b"KEY", key)
    asked = b"".join(
        post + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) + _HEALTH + b"\r\n"
        for body in bodies
    )
    async with start() as server:
        reader, writer = await server.connect()
        writer.write(asked)
        for number in range(len(bodies)):
            assert await _status(reader) == 201
            assert json.loads(await _body(reader))["name"] == f"job {number}"
            assert await _status(reader) == 200
            assert json.loads(await _body(reader)) == {"status": "ok"}
        writer.close()


@pytest.mark.parametrize("path", ["/v1/jobs/JOB/stream", "/v1/events/stream"])
async def test_a_stream_ends_when_its_key_expires(
    start: Start, service: Any, submit: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Nobody tells of it: keys are looked at every 15 seconds, here more often."""
    monkeypatch.setattr(stream_reader, "_CHECK", 0.2)
    admin = service.client(await service.key("root", "admin"))
    job = await submit(await service.user("brief"))
    body = {"name": "n", "owner": "brief", "scopes": ["jobs:read"]}
    made = (await admin.post("/keys", json=body)).json()
    async with start() as server:
        reader, writer = await server.connect()
        request = f"GET {path.replace('JOB', job)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        writer.write(f"{request}Authorization: Bearer {made['key']}\r\n\r\n".encode())
        assert await _status(reader) == 200
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        await service.sql("UPDATE api_keys SET expires_at = now() WHERE id = :key", key=made["id"])
        told = await asyncio.wait_for(reader.read(), PATIENCE)
        assert told.endswith(b"0\r\n\r\n"), "the stream's last chunk"
        assert b"event: end" not in told
        writer.close()
        reader, writer = await server.connect()
        writer.write(_GET.replace(b"KEY", made["key"].encode()) + b"\r\n")
        assert await _status(reader) == 401
        writer.close()


async def test_a_download_that_nobody_reads_is_cut(start: Start, service: Any, submit: Any) -> None:
    user = await service.user("idler")
    job = await submit(user)
    # More than the kernel keeps for a reader: 32 MB of events in one page.
    await plant_long_events(service, job, 480)
    key = user.headers["Authorization"]
    async with start(write_timeout=0.5) as server:
        reader, writer = await server.connect(receive_bytes=4096)
        request = f"GET /v1/jobs/{job}/events?limit=500 HTTP/1.1\r\nHost: x\r\n"
        writer.write(f"{request}Authorization: {key}\r\n\r\n".encode())
        assert await _status(reader) == 200
        async with asyncio.timeout(PATIENCE):
            while await server.connections():
                await asyncio.sleep(0.05)
        await _lives(server)
        writer.transport.abort()
