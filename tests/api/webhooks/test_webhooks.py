"""Webhooks over HTTP: what may be asked for, and who sees what. Delivery has its own tests."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier

from octrain_api.controller.webhook_queue import Due, pause_after
from octrain_api.controller.webhooks import choose
from octrain_api.settings import WebhookSettings
from octrain_api.webhooks.addresses import is_allowed, parse_networks
from octrain_api.webhooks.messages import event_type, pattern_problem, wants
from octrain_api.webhooks.signing import new_secret, signed_headers

URL = "https://hooks.example.com/octrain?token=1"


async def _make(user: Any, **changes: Any) -> dict[str, Any]:
    answer = await user.post("/webhooks", json={"url": URL} | changes)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def test_the_secret_is_shown_once_and_the_rest_always(service: Any) -> None:
    user = await service.user()
    made = await _make(user, events=["job.failed"], labels={"team": "nlp"}, description="d")
    secret = made.pop("secret")
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert (await user.get(f"/webhooks/{made['id']}")).json() == made
    listed = await user.get("/webhooks")
    assert listed.json() == {"items": [made], "next_cursor": None}
    assert secret not in listed.text
    changed = await user.patch(
        f"/webhooks/{made['id']}", json={"events": ["job.*"], "active": False}
    )
    assert changed.json() == made | {"events": ["job.*"], "active": False}
    assert (await user.delete(f"/webhooks/{made['id']}")).status_code == 204
    assert (await user.get(f"/webhooks/{made['id']}")).status_code == 404


async def test_a_list_in_pages(service: Any) -> None:
    user = await service.user()
    ids = [(await _make(user))["id"] for _ in range(5)]
    seen, cursor = [], None
    while True:
        params = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = (await user.get("/webhooks", params=params)).json()
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ids[::-1]


async def test_only_the_owner_and_an_administrator_reach_it(service: Any) -> None:
    user, other = await service.user(), await service.user()
    made = await _make(user)
    for method, path in (
        ("GET", ""),
        ("PATCH", ""),
        ("DELETE", ""),
        ("POST", "/rotate"),
        ("POST", "/test"),
        ("GET", "/deliveries"),
        ("GET", "/deliveries/whd_1"),
        ("POST", "/deliveries/whd_1/redeliver"),
        ("POST", "/redeliver"),
    ):
        body = {"since": "2026-01-01T00:00:00Z"} if path == "/redeliver" else {}
        json = None if method in ("GET", "DELETE") else body
        answer = await other.request(method, f"/webhooks/{made['id']}{path}", json=json)
        assert answer.status_code == 404, (method, path, answer.text)
    assert (await other.get("/webhooks")).json()["items"] == []
    reader = service.client(await service.key("someone", "jobs:read"))
    assert (await reader.post("/webhooks", json={"url": URL})).status_code == 403
    admin = service.client(await service.key("operations", "admin"))
    assert (await admin.get(f"/webhooks/{made['id']}")).json()["owner"] == made["owner"]


_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"url": "http://hooks.example.com/"}, "/url", "not allowed"),
    ({"url": "ftp://hooks.example.com/"}, "/url", "https://"),
    ({"url": "hooks.example.com"}, "/url", "https://"),
    ({"url": "https://"}, "/url", "no host"),
    ({"url": "https://xn--a.example.com/"}, "/url", "not a URL"),
    ({"url": "https://xn--/"}, "/url", "not a URL"),
    ({"url": "https://\u2488com/"}, "/url", "not a URL"),
    ({"url": "https://hooks..example.com/"}, "/url", "no name"),
    ({"url": "https://./"}, "/url", "no name"),
    ({"url": "https://-.example.com/"}, "/url", "no name"),
    ({"url": "https://hooks example.com/"}, "/url", "no name"),
    ({"url": f"https://{'a.' * 130}com/"}, "/url", "no name"),
    ({"url": "https://me:secret@hooks.example.com/"}, "/url", "user name"),
    ({"url": "https://hooks.example.com/#x"}, "/url", "#fragment"),
    ({"url": "https://hooks.example.com:99999/"}, "/url", "port"),
    ({"url": "https://127.0.0.1/"}, "/url", "public address"),
    ({"url": "https://[::ffff:10.0.0.1]/"}, "/url", "public address"),
    ({"url": "https://169.254.169.254/latest"}, "/url", "public address"),
    ({"events": ["job.exploded"]}, "/events/0", "no status"),
    ({"events": ["node.lost"]}, "/events/0", "names no events"),
    ({"events": []}, "/events", "at least 1"),
    ({"labels": {"a": 1}}, "/labels/a", "string"),
    ({"secret": "mine"}, "/secret", "not permitted"),
]


async def test_what_is_refused(service: Any) -> None:
    user = await service.user()
    made = await _make(user)
    for change, pointer, words in _REFUSALS:
        answer = await user.post("/webhooks", json={"url": URL} | change)
        assert answer.status_code == 422, change
        [error] = answer.json()["errors"]
        assert error["pointer"] == pointer, change
        assert words in error["message"], change
        if pointer == "/url":
            assert (await user.patch(f"/webhooks/{made['id']}", json=change)).status_code == 422


async def test_the_longest_label_of_a_job_can_be_filtered_by(service: Any, spec: Any) -> None:
    user = await service.user()
    labels = {"k" * 64: "v" * 256}
    made = await user.post("/jobs?draft=true", json=spec | {"labels": labels})
    assert (await _make(user, labels=made.json()["labels"]))["labels"] == labels


async def test_an_owner_has_so_many_at_most(service: Any) -> None:
    service.settings.webhooks = WebhookSettings(most_per_owner=2)
    user = await service.user()
    await _make(user)
    await _make(user)
    answer = await user.post("/webhooks", json={"url": URL})
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/too-many-webhooks")


async def test_rotation_keeps_the_former_secret_for_a_while(service: Any) -> None:
    user = await service.user()
    made = await _make(user)
    path = f"/webhooks/{made['id']}/rotate"
    rotated = (await user.post(path, json={"keep_seconds": 60})).json()
    assert rotated["secret"] != made["secret"]
    assert rotated["old_secret_until"] is not None
    again = (await user.post(path)).json()
    assert again["old_secret_until"] > rotated["old_secret_until"]
    for _ in range(5):
        await user.post(path)
    [row] = await service.sql(
        "SELECT jsonb_array_length(old_secrets) AS n FROM webhooks WHERE id = :id", id=made["id"]
    )
    assert row.n == 4
    leaked = (await user.post(path, json={"keep_seconds": 0})).json()
    assert leaked["old_secret_until"] is None
    assert (await user.post(path, json={"keep_seconds": -1})).status_code == 422


def test_signatures_verify_elsewhere() -> None:
    """An implementation that is not ours takes each of the two signatures, and no other body."""
    import time

    old, new = new_secret(), new_secret()
    body = '{"type":"job.failed","data":{"text":"Ünïcode"}}'
    headers = signed_headers([new, old], "msg_1", int(time.time()), body.encode())
    for secret in (old, new):
        assert Verifier(secret).verify(body, headers)["type"] == "job.failed"
    for secret, text in ((new_secret(), body), (new, body + " ")):
        with pytest.raises(Exception, match="No matching signature"):
            Verifier(secret).verify(text, headers)
    with pytest.raises(Exception, match="too old"):
        Verifier(new).verify(body, signed_headers([new], "msg_1", 1_000_000_000, body.encode()))


def test_types_and_filters() -> None:
    assert event_type("status", {"to": "failed"}) == "job.failed"
    assert event_type("node_unreachable", {}) == "job.event.node_unreachable"
    assert event_type("a trainer's own!", {}) == "job.event.a_trainer_s_own_"
    assert event_type("status", {"to": "elsewhere"}) == "job.event.status"
    for pattern in ("job.*", "job.succeeded", "job.event.*", "job.event.stalled"):
        assert pattern_problem(pattern) is None, pattern
    for pattern in ("*", "job", "job.event", "job.event.", "job.event.a.b", "job.paused.*"):
        assert pattern_problem(pattern) is not None, pattern
    assert wants(["job.*"], {}, "job.event.stalled", {})
    assert wants(["job.event.*"], {"a": "1"}, "job.event.stalled", {"a": "1", "b": "2"})
    assert not wants(["job.event.*"], {}, "job.failed", {})
    assert not wants(["job.fail"], {}, "job.failed", {})
    assert not wants(["job.*"], {"a": "1"}, "job.failed", {"a": "2"})
    assert not wants(["job.*"], {"a": "1"}, "job.failed", {})


_REFUSED = """
0.0.0.0 10.1.2.3 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 168.63.129.16 169.254.169.254
172.16.0.1 192.0.0.192 192.0.2.1 192.168.1.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 240.0.0.1
255.255.255.255 :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:a9fe:a9fe ::ffff:0:7f00:1 64:ff9b::7f00:1
64:ff9b:1::1 100::1 2001:0:7f00:1:: 2001:db8::1 2002:7f00:1:: 2002:a9fe:a9fe:: fc00::1
fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1
"""


def test_addresses() -> None:
    for address in _REFUSED.split():
        assert not is_allowed(address), address
    for address in ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert is_allowed(address), address
    some = parse_networks("10.1.0.0/16, fd12::/16")
    assert is_allowed("10.1.2.3", some)
    assert is_allowed("::ffff:10.1.2.3", some)
    assert is_allowed("fd12::1", some)
    assert not is_allowed("10.2.0.1", some)
    assert not is_allowed("127.0.0.1", some)
    # All of IPv6 opens no IPv4 address that hides in it.
    assert not is_allowed("::ffff:127.0.0.1", parse_networks("::/0"))
    with pytest.raises(ValueError, match="not-a-network"):
        WebhookSettings(allowed_networks_text="not-a-network")


def test_pauses_grow_to_a_bound() -> None:
    settings = WebhookSettings(retry_first=5, retry_longest=3600)
    for tries, middle in ((1, 5), (2, 20), (3, 80), (4, 320), (9, 3600), (100, 3600)):
        pauses = [pause_after(tries, settings) for _ in range(50)]
        assert 0.8 * middle <= min(pauses) < max(pauses) <= 1.2 * middle


def test_failing_endpoints_leave_room() -> None:
    settings = WebhookSettings(concurrency=8, concurrency_per_endpoint=3)
    failing = [Due(f"f{n}", f"bad{n // 2}", True) for n in range(40)]
    good = [Due(f"g{n}", f"good{n // 5}", False) for n in range(15)]
    chosen = choose([*failing, *good], {}, 0, settings)
    bad = [due.webhook_id for due in chosen if due.failing]
    assert bad == ["bad0", "bad1", "bad2", "bad3"]
    assert [due.webhook_id for due in chosen if not due.failing] == ["good0"] * 3 + ["good1"]
    # Four that fail are under way: no more of them, however many places there are.
    busy = dict.fromkeys(bad, 1)
    assert {due.failing for due in choose([*failing, *good], busy, 4, settings)} == {False}
    assert choose(failing, busy, 4, settings) == []
    assert choose(good, {"good0": 8}, 0, settings) == []
