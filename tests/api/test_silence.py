"""A database that takes what it is sent and says nothing: nobody may wait for it without end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import pytest
from sqlalchemy import text

from octrain_api.database import Database
from octrain_api.settings import DatabaseSettings
from octrain_api.tasks import end_tasks
from tests.worker.swallowing_proxy import SwallowingProxy

# Of the slowest machine; without the watch the answers would never come.
PATIENCE = 60.0


@pytest.fixture
async def proxy(copied_url: str) -> AsyncIterator[SwallowingProxy]:
    port = urlsplit(copied_url).port
    assert port is not None
    with SwallowingProxy(port) as found:
        yield found


def through(proxy: SwallowingProxy, url: str) -> str:
    """The same database by way of the proxy."""
    parts = urlsplit(url)
    account = parts.netloc.rpartition("@")[0]
    host = f"127.0.0.1:{proxy.port}"
    return urlunsplit(parts._replace(netloc=f"{account}@{host}" if account else host))


async def test_a_database_that_gives_no_answer_is_503(
    copied_url: str,
    redis_url: str,
    tmp_path: Path,
    proxy: SwallowingProxy,
    make_service: Callable[..., AsyncIterator[Any]],
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, Any],
) -> None:
    for name, value in (("POOL_SIZE", "2"), ("CONNECT_TIMEOUT", "2"), ("ANSWER_TIMEOUT", "1")):
        monkeypatch.setenv(f"OCTRAIN_DATABASE_{name}", value)
    async for service in make_service(through(proxy, copied_url), redis_url, tmp_path):
        assert service.settings.database.answer_timeout == 1
        user = await service.user("ada")
        job = (await user.post("/jobs?draft=true", json=spec)).json()["id"]
        assert (await user.get(f"/jobs/{job}")).status_code == 200
        proxy.swallowing.set()
        asked: list[Awaitable[httpx.Response]] = [
            user.get("/jobs"),
            user.get(f"/jobs/{job}?wait=1"),
            user.post("/jobs", json=spec),
            user.patch(f"/jobs/{job}", json={"name": "other"}),
            user.post(f"/jobs/{job}/cancel"),
            user.get("/usage"),
        ]
        answers = await asyncio.wait_for(asyncio.gather(*asked), PATIENCE)
        for answer in answers:
            assert answer.status_code == 503, answer.text
            assert answer.json()["type"] == "/problems/database-unavailable"
            assert "may have been changed" in answer.json()["detail"]
        ready = await asyncio.wait_for(service.client(None).get("http://octrain/readyz"), PATIENCE)
        assert (ready.status_code, ready.json()["checks"]["database"]) == (
            503,
            "cannot be reached",
        )
        proxy.swallowing.clear()
        deadline = time.monotonic() + PATIENCE
        while (await user.get(f"/jobs/{job}")).status_code != 200:
            assert time.monotonic() < deadline
        assert (await user.post("/jobs?draft=true", json=spec)).status_code == 201


async def test_a_statement_that_takes_long_is_not_given_up(copied_url: str) -> None:
    """The database answers others meanwhile."""
    database = Database(DatabaseSettings(url=copied_url, answer_timeout=0.3), "test")
    watching = asyncio.create_task(database.silence.run())
    try:
        async with database.session() as session, database.direct() as direct:
            sleep = "SELECT pg_sleep(2), 7"
            one, other = await asyncio.gather(session.execute(text(sleep)), direct.execute(sleep))
            assert one.one()[1] == 7
            row = await other.fetchone()
            assert row is not None
            assert row[1] == 7
        assert not watching.done()
    finally:
        await end_tasks([watching])
        await database.close()
