"""The outbox and the controller process, with a real broker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import redis

from octrain_api.controller.main import run
from octrain_api.controller.relay import BrokerUnavailable, CelerySender, place_elsewhere, relay
from octrain_api.settings import BrokerSettings


def _messages(redis_url: str, queue: str) -> list[dict[str, Any]]:
    with redis.Redis.from_url(redis_url) as connection:
        return [json.loads(raw) for raw in connection.lrange(queue, 0, -1)]


@pytest.fixture
def sender(redis_url: str) -> Any:
    sender = CelerySender(BrokerSettings(url=redis_url))
    yield sender
    sender.close()


async def _later(service: Any, seconds: int) -> None:
    """Let the outbox grow older."""
    await service.sql("UPDATE outbox SET sent_at = sent_at - make_interval(secs => :s)", s=seconds)


async def test_a_message_is_a_pointer(
    worker: Any, user: Any, submit: Any, lone_service: Any, sender: Any, redis_url: str
) -> None:
    job_id = await submit(user)
    await worker.schedule()
    attempt = await worker.placed(job_id)
    settings = lone_service.settings.controller
    assert await relay(lone_service.database, settings, sender) == 1
    assert await relay(lone_service.database, settings, sender) == 0
    [message] = _messages(redis_url, f"node.{worker.node_id}")
    assert message["headers"]["task"] == "octrain.run_attempt"
    assert message["headers"]["id"] == f"{job_id}:1"
    assert message["content-type"] == "application/json"
    args, kwargs, _ = json.loads(__import__("base64").b64decode(message["body"]))
    assert args == []
    assert kwargs == {"job_id": job_id, "attempt_id": attempt, "attempt": 1}


async def test_unclaimed_is_sent_three_times_then_placed_elsewhere(
    worker: Any, user: Any, submit: Any, lone_service: Any, sender: Any, redis_url: str
) -> None:
    deaf = worker.node_id
    job_id = await submit(user)
    await worker.schedule()
    first = await worker.placed(job_id)
    settings = lone_service.settings.controller
    for sending in (1, 2, 3):
        assert await relay(lone_service.database, settings, sender) == 1
        assert len(_messages(redis_url, f"node.{deaf}")) == sending
        assert await place_elsewhere(lone_service.database, settings) == 0
        await _later(lone_service, 31)
    assert await relay(lone_service.database, settings, sender) == 0
    assert await place_elsewhere(lone_service.database, settings) == 1
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert (job["status"], job["restarts"]) == ("queued", 0)
    assert job["attempts"][0]["reason"] == "undelivered"
    await worker.register("node-b")
    await worker.schedule()
    rows = await lone_service.sql("SELECT node_id FROM attempts WHERE status = 'placed'")
    assert [row.node_id for row in rows] == [worker.node_id]
    worker.node_id = deaf
    await worker.speak_for("node-a")
    assert (await worker.claim(first)).status_code == 409


async def test_a_claim_ends_the_sending(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    await worker.take(await submit(user))
    assert await lone_service.sql("SELECT 1 FROM outbox") == []


async def test_a_node_that_comes_back_is_told_again_at_once(
    worker: Any, user: Any, submit: Any, lone_service: Any, sender: Any
) -> None:
    await submit(user)
    await worker.schedule()
    settings = lone_service.settings.controller
    assert await relay(lone_service.database, settings, sender) == 1
    await worker.register()
    assert await relay(lone_service.database, settings, sender) == 1


async def test_without_a_broker_nothing_is_lost(
    worker: Any, user: Any, submit: Any, lone_service: Any, sender: Any
) -> None:
    job_id = await submit(user)
    await worker.schedule()
    settings = lone_service.settings.controller
    nowhere = CelerySender(BrokerSettings(url="redis://127.0.0.1:1/0", connect_timeout=0.5))
    with pytest.raises(BrokerUnavailable):
        await relay(lone_service.database, settings, nowhere)
    nowhere.close()
    [row] = await lone_service.sql("SELECT sendings, sent_at FROM outbox")
    assert (row.sendings, row.sent_at) == (0, None)
    assert (await user.get(f"/jobs/{job_id}")).json()["status"] == "starting"
    assert await relay(lone_service.database, settings, sender) == 1


async def test_a_node_that_falls_silent_before_its_claim_loses_the_attempt(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """At once, and without a word from the broker, which may be away as well."""
    await worker.reconcile()
    job_id = await submit(user)
    await worker.schedule()
    first = await worker.placed(job_id)
    settings = lone_service.settings.controller
    assert await place_elsewhere(lone_service.database, settings) == 0
    await lone_service.advance(settings.heartbeat_ttl + 1)
    await worker.reconcile()
    assert await place_elsewhere(lone_service.database, settings) == 1
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert (job["status"], job["restarts"]) == ("queued", 0)
    assert job["attempts"][0]["reason"] == "undelivered"
    assert "not heard" in job["attempts"][0]["detail"]
    assert await worker.schedule() == 0
    # Awake again, it finds its attempt taken; it is heard, so it may have the next one.
    assert (await worker.claim(first)).status_code == 409
    await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={"active_attempts": []})
    assert await worker.schedule() == 1
    assert await place_elsewhere(lone_service.database, settings) == 0


async def test_a_live_node_that_begins_nothing_loses_the_attempt_though_the_broker_is_away(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """It is told in the answers to its heartbeats; for as long as messages would have been sent."""
    settings = lone_service.settings.controller
    patience = settings.resend_after * (settings.max_sendings + 1)

    async def lives(seconds: float, *, service_away: bool = False) -> None:
        await lone_service.advance(seconds, service_away=service_away)
        answer = await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
        assert [one["attempt_id"] for one in answer.json()["placed"]] == [attempt]
        await worker.reconcile()

    await worker.reconcile()
    job_id = await submit(user)
    await worker.schedule()
    attempt = await worker.placed(job_id)
    # While the service itself was away nobody could claim.
    await lives(3600, service_away=True)
    assert await place_elsewhere(lone_service.database, settings) == 0
    await lives(patience - 30)
    assert await place_elsewhere(lone_service.database, settings) == 0
    await lives(31)
    assert await place_elsewhere(lone_service.database, settings) == 1
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert (job["status"], job["restarts"]) == ("queued", 0)
    assert "did not take it" in job["attempts"][0]["detail"]


async def _until(check: Any, seconds: float = 20) -> Any:
    async with asyncio.timeout(seconds):
        while True:
            value = await check()
            if value:
                return value
            await asyncio.sleep(0.05)


async def test_the_controller_places_and_sends_and_one_leads(
    worker: Any, user: Any, submit: Any, lone_service: Any, redis_url: str
) -> None:
    """Two controllers: one leads; when it ends, the other takes over; both end when asked to."""
    stops = [asyncio.Event(), asyncio.Event()]
    controllers = [asyncio.create_task(run(lone_service.settings, stop)) for stop in stops]

    async def leaders() -> int:
        rows = await lone_service.sql(
            "SELECT count(*) AS n FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
            "WHERE l.locktype = 'advisory' AND d.datname = current_database() AND granted"
        )
        return int(rows[0].n)

    async def sent() -> bool:
        rows = await lone_service.sql("SELECT min(sendings) AS n FROM outbox")
        return bool(rows[0].n)

    job_id = await submit(user)
    await _until(sent)
    assert await leaders() == 1
    assert (await user.get(f"/jobs/{job_id}")).json()["status"] == "starting"
    assert len(_messages(redis_url, f"node.{worker.node_id}")) == 1
    stops[0].set()
    await asyncio.wait_for(controllers[0], 10)
    await worker.claim(await worker.placed(job_id))
    await worker.finish("succeeded", "completed")
    await submit(user)
    await _until(sent)
    stops[1].set()
    await asyncio.wait_for(controllers[1], 10)
    assert await leaders() == 0
