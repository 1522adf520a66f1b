"""Requests per key: told in headers, refused with 429, shared by all API processes."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx
import pytest

from octrain_api.app import create_app
from octrain_api.database import Database
from octrain_api.rate_limits.limiter import AddressLimiter, RateLimiter
from octrain_api.rate_limits.policy import Policy
from octrain_api.settings import RateLimitSettings

HOUR = Policy("read", 100, 3600)


@pytest.fixture
async def limited(lone_service: Any) -> Any:
    """A client of an application whose limits are small: 20 reads, 5 writes, 3 failures an hour."""
    limits = RateLimitSettings(window=3600, read=20, write=5, worker=4, address=3)
    settings = lone_service.settings.model_copy(update={"rate_limits": limits})
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://octrain/v1") as client:
            yield client


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_headers_tell_the_limit_and_429_its_end(limited: Any, lone_service: Any) -> None:
    key = _bearer(await lone_service.key("ada", "jobs:read", "jobs:write"))
    left = []
    for _ in range(20):
        answer = await limited.get("/jobs", headers=key)
        assert answer.status_code == 200
        assert answer.headers["ratelimit-policy"] == '"read";q=20;w=3600'
        found = re.fullmatch(r'"read";r=(\d+);t=(\d+)', answer.headers["ratelimit"])
        assert found is not None
        left.append(int(found[1]))
    assert left == list(range(19, -1, -1))
    for _ in range(3):
        refused = await limited.get("/jobs", headers=key)
        assert (refused.status_code, refused.json()["type"]) == (429, "/problems/rate-limited")
        assert refused.headers["ratelimit"].startswith('"read";r=0;')
        assert 1 <= int(refused.headers["retry-after"]) <= 180
        assert refused.headers["x-request-id"] == refused.json()["request_id"]
    # Writes have a limit of their own, and so has every other key.
    assert (await limited.post("/jobs", headers=key, json={})).status_code == 422
    other = _bearer(await lone_service.key("ada", "jobs:read"))
    assert (await limited.get("/jobs", headers=other)).status_code == 200
    # Health and documentation have none.
    for _ in range(30):
        assert (await limited.get("http://octrain/healthz")).status_code == 200


async def test_conditional_reads_count_as_well(
    limited: Any, lone_service: Any, submit: Any
) -> None:
    user = await lone_service.user("ada")
    path = f"/jobs/{await submit(user)}"
    await user.post(f"{path}/cancel")
    key = _bearer(await lone_service.key("ada", "jobs:read"))
    tag = (await limited.get(path, headers=key)).headers["etag"]
    statuses = [
        (await limited.get(path, headers=key | {"If-None-Match": tag})).status_code
        for _ in range(25)
    ]
    assert statuses == [304] * 19 + [429] * 6


async def test_nodes_have_their_own_class(limited: Any, lone_service: Any) -> None:
    key = _bearer(await lone_service.key("ops", "node"))
    statuses = [
        (await limited.post("/nodes/x/heartbeat", headers=key, json={})).status_code
        for _ in range(6)
    ]
    assert statuses == [404] * 4 + [429] * 2


async def test_guesses_are_limited_by_address(limited: Any, lone_service: Any) -> None:
    wrong = _bearer("oct_wrong")
    statuses = [(await limited.get("/jobs", headers=wrong)).status_code for _ in range(5)]
    assert statuses == [401] * 3 + [429] * 2
    refused = await limited.get("/jobs", headers=wrong)
    assert int(refused.headers["retry-after"]) > 1


async def test_many_processes_share_one_bucket(lone_service: Any) -> None:
    """Four limiters, as four processes have them, never give more than the bucket holds."""
    databases = [Database(lone_service.settings.database) for _ in range(4)]
    limiters = [RateLimiter(database) for database in databases]
    answers = await asyncio.gather(*(limiters[n % 4].take("key", HOUR) for n in range(200)))
    passed = sum(answer.allowed for answer in answers)
    # All of it, but for what other processes may still hold: 2 percent each.
    assert 100 - 3 * HOUR.portion <= passed <= 100
    for database in databases:
        await database.close()


async def test_the_database_is_asked_once_a_portion(lone_service: Any) -> None:
    policy = Policy("read", 10_000, 3600)
    assert policy.portion == 200
    limiter = RateLimiter(lone_service.database)
    for _ in range(250):
        assert (await limiter.take("busy", policy)).allowed
    rows = await lone_service.sql("SELECT tokens FROM rate_buckets WHERE name = 'read:busy'")
    assert 9_600 <= rows[0].tokens < 9_602, "two portions were taken"


async def test_what_was_used_is_refilled_evenly(lone_service: Any) -> None:
    limiter = RateLimiter(lone_service.database)
    while (await limiter.take("slow", HOUR)).allowed:
        pass
    await lone_service.sql("UPDATE rate_buckets SET updated_at = updated_at - interval '30 min'")
    again = RateLimiter(lone_service.database)
    passed = 0
    while (await again.take("slow", HOUR)).allowed:
        passed += 1
    assert passed in (50, 51)


async def test_an_empty_bucket_costs_no_query(lone_service: Any) -> None:
    limiter = RateLimiter(lone_service.database)
    while (await limiter.take("empty", HOUR)).allowed:
        pass
    await lone_service.sql("UPDATE rate_buckets SET tokens = 50 WHERE name = 'read:empty'")
    assert not (await limiter.take("empty", HOUR)).allowed, "it is known to be empty for a while"


def test_addresses_are_refilled_and_bounded() -> None:
    limiter = AddressLimiter(Policy("address", 2, 1))
    for _ in range(2):
        assert limiter.allows("a") is None
        limiter.count("a")
    assert limiter.allows("a") is not None
    assert limiter.allows("b") is None
    deadline = time.monotonic() + 30
    while limiter.allows("a") is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    unlimited = AddressLimiter(None)
    for _ in range(100):
        unlimited.count("a")
    assert unlimited.allows("a") is None
