"""Signing in with a browser: what the cookie may, what forges it not, and what ends it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from octrain_api.app import create_app
from octrain_api.keys.principal import hash_key
from octrain_api.settings import RateLimitSettings, SessionSettings
from tests.api.live import listening
from tests.api.test_access import BODIES, SCOPES

CSRF = "X-Octrain-CSRF"
ORIGIN = "http://octrain"
SAFE = ("GET", "HEAD")

SignIn = Callable[..., Awaitable[tuple[httpx.AsyncClient, dict[str, Any]]]]


async def _sign_in(service: Any, key: str) -> tuple[httpx.AsyncClient, dict[str, Any]]:
    """A browser with the session of this key, and the answer to its sign-in."""
    browser = service.client(None)
    answer = await browser.post("/session", json={"key": key}, headers={"Origin": ORIGIN})
    assert answer.status_code == 201, answer.text
    return browser, dict(answer.json())


def _url(template: str) -> str:
    return ORIGIN + re.sub(r"\{[^}]*\}", "x", template)


async def test_a_session_may_what_its_key_may(service: Any, submit: Any) -> None:
    key = await service.key("ada", "jobs:read", "jobs:write")
    browser, session = await _sign_in(service, key)
    assert (session["owner"], session["scopes"]) == ("ada", ["jobs:read", "jobs:write"])
    own = await service.client(key).get("/keys/self")
    assert session["key_id"] == own.json()["id"]
    assert (await browser.get("/session")).json() == session
    assert (await browser.get("/jobs")).status_code == 200
    browser.headers[CSRF] = session["csrf_token"]
    job_id = await submit(browser)
    assert (await browser.get(f"/jobs/{job_id}")).json()["owner"] == "ada"
    cancelled = await browser.post(f"/jobs/{job_id}/cancel", headers={"Origin": ORIGIN})
    assert cancelled.json()["status"] == "cancelled"
    assert (await browser.get("/keys")).status_code == 403, "no more than the key"
    # What is unchanged is told so to a session as well.
    tag = (await browser.get(f"/jobs/{job_id}")).headers["etag"]
    unchanged = await browser.get(f"/jobs/{job_id}", headers={"If-None-Match": tag})
    assert unchanged.status_code == 304
    stranger, _ = await _sign_in(service, await service.key("eve", "jobs:read"))
    answer = await stranger.get(f"/jobs/{job_id}", headers={"If-None-Match": tag})
    assert answer.status_code == 404


async def test_the_cookie_is_out_of_reach(service: Any) -> None:
    key = await service.key("ada", "jobs:read")
    for origin, name, secure in (
        ("http://octrain", "octrain_session", False),
        ("https://octrain", "__Host-octrain_session", True),
    ):
        answer = await service.client(None).post(
            "/session", json={"key": key}, headers={"Origin": origin}
        )
        cookie = answer.headers["set-cookie"]
        value, *rest = cookie.split("; ")
        attributes = {part.lower() for part in rest}
        assert value.startswith(f"{name}=octs_")
        assert {"httponly", "samesite=strict", "path=/"} <= attributes
        assert ("secure" in attributes) == secure
        assert not any(part.startswith("domain") for part in attributes)
        assert f"max-age={7 * 86_400}" in attributes
        assert answer.headers["cache-control"] == "no-store"
        token = value.partition("=")[2]
        assert token not in answer.text
        rows = await service.sql("SELECT * FROM sessions WHERE token_hash = :h", h=hash_key(token))
        assert len(rows) == 1
        assert token not in str(rows), "only the hash is stored"
        assert answer.json()["csrf_token"] not in str(rows)
        # The token is a cookie's, and no key.
        assert (await service.client(token).get("/jobs")).status_code == 401


async def test_no_unsafe_route_takes_the_cookie_alone(lone_service: Any) -> None:
    """Every route, with the best key that a browser may have."""
    service = lone_service
    key = await service.key("root", "admin", "jobs:read", "jobs:write")
    browser, session = await _sign_in(service, key)
    other, others = await _sign_in(service, key)
    csrf = session["csrf_token"]
    forged: list[dict[str, str]] = [
        {},
        {CSRF: csrf, "Origin": "http://evil.example"},
        {CSRF: ""},
        {CSRF: others["csrf_token"]},
        {CSRF: csrf, "Origin": "http://octrain:8080"},
        {CSRF: csrf, "Origin": "null"},
        {CSRF: csrf, "Sec-Fetch-Site": "cross-site"},
        {CSRF: csrf, "Sec-Fetch-Site": "same-site"},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"},
    ]
    tried = 0
    for method, template in SCOPES:
        if method in SAFE:
            continue
        bare = template.removeprefix("/v1")
        tries = [(template, headers) for headers in (forged if bare == "/jobs" else forged[:2])]
        for path, headers in [*tries, (bare, {})]:
            answer = await browser.request(
                method, _url(path), json=BODIES.get(template, {}), headers=headers
            )
            assert answer.status_code == 403, (method, path, headers)
            assert answer.json()["type"] == "/problems/csrf-refused", (method, path, headers)
            tried += 1
    assert tried > 130
    assert (await browser.get("/session")).status_code == 200, "signing out was refused, too"
    assert (await other.get("/session")).status_code == 200
    # With the token each goes as far as the key itself.
    proven = {CSRF: csrf, "Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"}
    for method, template in SCOPES:
        if method in SAFE or template.endswith("/session"):
            continue
        body = BODIES.get(template, {})
        answer = await browser.request(method, _url(template), json=body, headers=proven)
        assert answer.status_code not in (401, 415), (method, template)
        assert "csrf-refused" not in answer.text, (method, template)
    bearer = service.client(key)
    # A request with a key of its own is judged by that, whatever cookie comes along.
    wrong = {"Authorization": "Bearer oct_wrong", CSRF: csrf}
    assert (await browser.get("/jobs", headers=wrong)).status_code == 401
    assert (await browser.post("/jobs", json={}, headers=wrong)).status_code == 401
    refusals = (await bearer.get("/audit?outcome=refused&limit=500")).json()["items"]
    assert any(entry["key_id"] == session["key_id"] for entry in refusals), "the attempt is told"


async def test_signing_in_is_asked_by_our_pages_only(service: Any) -> None:
    key = await service.key("ada", "jobs:read")
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        answer = await service.client(None).post("/session", json={"key": key}, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (403, "/problems/csrf-refused")
        assert "set-cookie" not in answer.headers
    # A form of another site cannot say that it sends JSON.
    answer = await service.client(None).post("/session", data={"key": key})
    assert answer.status_code == 415
    for wrong in ("oct_wrong", "octs_wrong"):
        answer = await service.client(None).post("/session", json={"key": wrong})
        assert (answer.status_code, answer.json()["type"]) == (401, "/problems/not-authenticated")
        assert wrong not in answer.json()["detail"]
    node = await service.key("ops", "node")
    answer = await service.client(None).post("/session", json={"key": node})
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/scope-missing")
    # A page that is open still may sign in anew, as somebody else.
    browser, _ = await _sign_in(service, key)
    other = await service.key("eve", "jobs:read")
    assert (await browser.post("/session", json={"key": other})).status_code == 201
    assert (await browser.get("/session")).json()["owner"] == "eve"


async def test_a_proxys_public_origin_is_named_by_the_operator(lone_service: Any) -> None:
    sessions = SessionSettings(origins_text="https://train.example.com")
    app = create_app(lone_service.settings.model_copy(update={"sessions": sessions}))
    key = await lone_service.key("ada", "jobs:read")
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://inside:8000") as client:
            for origin, status in (
                ("https://train.example.com", 201),
                ("http://inside:8000", 201),
                ("https://other.example.com", 403),
            ):
                answer = await client.post(
                    "/v1/session", json={"key": key}, headers={"Origin": origin}
                )
                assert answer.status_code == status, origin
    with pytest.raises(ValueError, match="is not an origin"):
        SessionSettings(origins_text="train.example.com")


async def test_what_ends_a_session(service: Any) -> None:
    admin = service.client(await service.key("root", "admin"))

    async def opened(**more: Any) -> tuple[httpx.AsyncClient, dict[str, Any]]:
        body = {"name": "k", "owner": "ada", "scopes": ["jobs:read"], **more}
        made = (await admin.post("/keys", json=body)).json()
        browser, session = await _sign_in(service, made["key"])
        assert (await browser.get("/jobs")).status_code == 200
        return browser, session

    browser, session = await opened()
    out = await browser.delete("/session", headers={CSRF: session["csrf_token"]})
    assert out.status_code == 204
    cleared = {line.partition("=")[0] for line in out.headers.get_list("set-cookie")}
    assert cleared == {"octrain_session", "__Host-octrain_session"}
    assert not browser.cookies, "the browser forgot it"

    # Of two browsers only one signs out; its cookie is worth nothing even where it was kept.
    key = await service.key("ada", "jobs:read")
    first, session = await _sign_in(service, key)
    second, _ = await _sign_in(service, key)
    kept = dict(first.cookies)
    await first.delete("/session", headers={CSRF: session["csrf_token"]})
    again = service.client(None)
    again.cookies.update(kept)
    ended = await again.get("/jobs")
    assert (ended.status_code, "sign in again" in ended.json()["detail"]) == (401, True)
    assert (await second.get("/jobs")).status_code == 200

    browser, session = await opened()
    await admin.delete(f"/keys/{session['key_id']}")
    assert (await browser.get("/jobs")).status_code == 401, "with its key"

    browser, session = await opened()
    await admin.post(f"/keys/{session['key_id']}/rotate", json={"grace_seconds": 3600})
    assert (await browser.get("/jobs")).status_code == 200, "the former secret has its grace"
    await admin.post(f"/keys/{session['key_id']}/rotate", json={"grace_seconds": 3600})
    assert (await browser.get("/jobs")).status_code == 401, "which a second rotation ends"

    browser, session = await opened(expires_at="2100-01-01T00:00:00Z")
    assert session["expires_at"] < "2100", "not for ever, whatever the key"
    await admin.patch(f"/keys/{session['key_id']}", json={"expires_at": None})
    await service.sql(
        "UPDATE sessions SET expires_at = now() - interval '1 s' WHERE id = :id", id=session["id"]
    )
    await service.sql("SELECT pg_notify('octrain_key', '')")
    await _until_status(browser, 401)
    await _sign_in(service, key)
    rows = await service.sql("SELECT 1 FROM sessions WHERE id = :id", id=session["id"])
    assert not rows, "the next sign-in sweeps"


async def _until_status(browser: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(30):
        while (await browser.get("/jobs")).status_code != status:
            await asyncio.sleep(0.05)


async def test_a_session_ends_with_a_key_that_ends_soon(service: Any) -> None:
    key = await service.key("ada", "jobs:read")
    hashed = hash_key(key)
    await service.sql(
        "UPDATE api_keys SET expires_at = now() + interval '100 s' WHERE key_hash = :h", h=hashed
    )
    answer = await service.client(None).post("/session", json={"key": key})
    found = re.search(r"Max-Age=(\d+)", answer.headers["set-cookie"])
    assert found is not None
    assert 0 < int(found[1]) <= 100


async def test_only_the_newest_sessions_of_a_key_are_kept(lone_service: Any) -> None:
    settings = lone_service.settings.model_copy(
        update={"sessions": SessionSettings(most_per_key=2)}
    )
    app = create_app(settings)
    key = await lone_service.key("ada", "jobs:read")
    other = await lone_service.key("eve", "jobs:read")
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        browsers = []
        for used in (other, key, key, key):
            browser = httpx.AsyncClient(transport=transport, base_url="http://octrain/v1")
            answer = await browser.post("/session", json={"key": used})
            assert answer.status_code == 201
            browsers.append(browser)
        statuses = [(await browser.get("/session")).status_code for browser in browsers]
        assert statuses == [200, 401, 200, 200]
        for browser in browsers:
            await browser.aclose()


@pytest.fixture
async def limited(lone_service: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that allows four sign-ins an hour, and two writes."""
    limits = RateLimitSettings(window=3600, write=2, sign_in=4)
    app = create_app(lone_service.settings.model_copy(update={"rate_limits": limits}))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octrain/v1") as client:
            yield client


async def test_sign_ins_and_sessions_are_limited(
    limited: httpx.AsyncClient, lone_service: Any
) -> None:
    key = await lone_service.key("ada", "jobs:read", "jobs:write")
    for used, status in ((key, 201), ("oct_wrong", 401), ("oct_wrong", 401), (key, 201)):
        answer = await limited.post("/session", json={"key": used})
        assert answer.status_code == status
    csrf = {CSRF: answer.json()["csrf_token"]}
    refused = await limited.post("/session", json={"key": key})
    assert (refused.status_code, refused.json()["limit"]) == (429, "sign-in")
    assert int(refused.headers["retry-after"]) > 1
    # A session spends what its key may.
    statuses = [(await limited.post("/jobs", json={}, headers=csrf)).status_code for _ in range(3)]
    assert statuses == [422, 422, 429]


async def test_sign_ins_are_in_the_audit_log(lone_service: Any) -> None:
    key = await lone_service.key("ada", "jobs:read")
    browser, session = await _sign_in(lone_service, key)
    await browser.delete("/session", headers={CSRF: session["csrf_token"]})
    admin = lone_service.client(await lone_service.key("root", "admin"))
    entries = (await admin.get("/audit", params={"target": session["id"]})).json()["items"]
    told = [(e["method"], e["route"], e["status"], e["owner"]) for e in entries]
    assert told == [("DELETE", "/session", 204, "ada"), ("POST", "/session", 201, "ada")]
    assert key not in str(entries)


async def test_a_stream_ends_with_its_session(service: Any, submit: Any) -> None:
    key = await service.key("ada", "jobs:read", "jobs:write")
    browser, session = await _sign_in(service, key)
    job_id = await submit(service.client(key))
    cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    async with listening(service.app, f"/v1/jobs/{job_id}/stream", None, cookie=cookie) as stream:
        await stream.until(lambda told: told)
        out = await browser.delete("/session", headers={CSRF: session["csrf_token"]})
        assert out.status_code == 204
        await stream.end()
