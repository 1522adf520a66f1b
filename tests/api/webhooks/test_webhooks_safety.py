"""Endpoints that are hostile or broken, and addresses that nobody may be sent to."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from octrain_api.webhooks.sender import Sender


async def test_redirects_are_not_followed(
    hooks: Any, receiver: Any, serve: Any, submit: Any
) -> None:
    with serve() as elsewhere:
        place = {"Location": elsewhere.url()}
        receiver.answer = lambda request, handler: (307, place, b"")
        webhook = await hooks.make(receiver.url())
        await submit(hooks.user)
        await hooks.deliver()
        assert elsewhere.requests == []
    [delivery] = await hooks.log(webhook["id"])
    assert delivery["status"] == "pending"
    assert "not followed" in delivery["attempts"][0]["error"]


async def test_an_answer_without_end_is_cut(hooks: Any, receiver: Any, submit: Any) -> None:
    sent = []

    def endless(request: Any, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")  # nothing is unpacked
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not receiver.closing.is_set():
                handler.wfile.write(b"x" * 65536)
                sent.append(65536)

    receiver.answer = endless
    webhook = await hooks.make(receiver.url())
    await submit(hooks.user)
    await asyncio.wait_for(hooks.deliver(), 30)
    [delivery] = await hooks.log(webhook["id"])
    assert delivery["status"] == "delivered"
    assert delivery["attempts"][0]["response_excerpt"] == "x" * 2048
    assert sum(sent) < 64 * 2**20


async def test_an_answer_that_does_not_come(hooks: Any, receiver: Any, submit: Any) -> None:
    hooks.use(timeout=0.3)
    receiver.answer = lambda request, handler: receiver.closing.wait(60) and None
    webhook = await hooks.make(receiver.url())
    await submit(hooks.user)
    await hooks.deliver()
    [delivery] = await hooks.log(webhook["id"])
    assert "no answer within 0.3 s" in delivery["attempts"][0]["error"]
    assert delivery["attempts"][0]["status_code"] is None

    def drip(request: Any, handler: BaseHTTPRequestHandler) -> None:
        """The status line comes, the body never ends: the message was taken."""
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"so far")
        receiver.closing.wait(60)

    receiver.answer = drip
    await hooks.make_due()
    await hooks.deliver()
    [delivery] = await hooks.log(webhook["id"])
    assert (delivery["status"], delivery["attempts"][1]["response_excerpt"]) == (
        "delivered",
        "so far",
    )


async def test_private_addresses_are_refused_after_dns(
    receiver: Any, webhook_settings: Any
) -> None:
    """Whatever a name said when it was registered: the address of this connection counts."""
    answers = [["::ffff:127.0.0.1", "10.0.0.1"], [], ["127.0.0.1", "::1"]]
    asked = []

    async def rebinding(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return answers.pop()

    sender = Sender(webhook_settings(allowed_networks_text=""), rebinding)
    while answers:
        outcome = await sender.post(f"http://rebind.example:{receiver.port}/", b"{}", {})
        assert outcome.status is None
        assert "not at a public address" in str(outcome.error)
    assert asked == [("rebind.example", receiver.port)] * 3, "asked once for each attempt"
    await sender.close()

    sender = Sender(webhook_settings(allowed_networks_text=""))
    for host in ("localhost", "127.1", "0x7f000001", "2130706433", "0.0.0.0", "[::1]", "0"):
        outcome = await sender.post(f"http://{host}:{receiver.port}/", b"{}", {})
        assert outcome.status is None, host
        assert outcome.error, host
    assert receiver.requests == []
    outcome = await sender.post("http://does-not-exist.invalid/", b"{}", {})
    assert "cannot be resolved" in str(outcome.error)
    await sender.close()

    async def mixed(host: str, port: int) -> list[str]:
        return ["10.0.0.1", "127.0.0.1"]

    sender = Sender(webhook_settings(), mixed)
    outcome = await sender.post(f"http://name.example:{receiver.port}/x", b"{}", {})
    assert outcome.status == 200, "the allowed one of the two, and no other, is connected to"
    assert receiver.requests[0].headers["host"] == f"name.example:{receiver.port}"
    assert (await sender.post("http://name.example:1/", b"{}", {})).error
    await sender.close()
    sender = Sender(webhook_settings(allow_http=False), mixed)
    outcome = await sender.post(receiver.url(), b"{}", {})
    assert "use https://" in str(outcome.error)
    await sender.close()


async def test_tls_proves_the_name_though_the_address_is_pinned(
    tmp_path: Path, serve: Any, webhook_settings: Any
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=hooks.example", "-addext", "subjectAltName=DNS:hooks.example"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def loopback(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    with serve(context) as secure:
        sender = Sender(webhook_settings(ca_file=certificate), loopback)
        good = await sender.post(f"https://hooks.example:{secure.port}/a", b"{}", {})
        assert (good.status, good.error) == (200, None)
        wrong = await sender.post(f"https://other.example:{secure.port}/b", b"{}", {})
        assert "CERTIFICATE_VERIFY_FAILED" in str(wrong.error)
        await sender.close()
        sender = Sender(webhook_settings(), loopback)
        unknown = await sender.post(f"https://hooks.example:{secure.port}/c", b"{}", {})
        assert "CERTIFICATE_VERIFY_FAILED" in str(unknown.error)
        await sender.close()
        assert [request.path for request in secure.requests] == ["/a"]
