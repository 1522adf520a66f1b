"""What arrives, what is tried again, and when an endpoint is given up."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier

from octrain_api.models import Job


async def test_an_event_arrives_signed_and_is_logged(
    hooks: Any, receiver: Any, submit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "octrain_api")
    caplog.set_level(logging.INFO)
    receiver.answer = lambda request, handler: (202, {}, b"thanks \x00\xff")
    webhook = await hooks.make(receiver.url("/hook?token=1"))
    job_id = await submit(hooks.user, name="one")
    await hooks.deliver()
    [request] = receiver.requests
    payload = Verifier(webhook["secret"]).verify(request.body, request.headers)
    assert payload["type"] == "job.queued"
    assert payload["data"]["job"] == {
        "id": job_id,
        "owner": "ada",
        "name": "one",
        "labels": {"team": "nlp"},
    }
    event = payload["data"]["event"]
    assert (event["seq"], event["kind"], event["truncated"]) == (1, "status", False)
    assert [event["seq"] for event in await hooks.linked(payload)] == [1]
    assert request.path == "/hook?token=1"
    assert "token=1" not in caplog.text
    assert webhook["secret"] not in caplog.text
    assert request.headers["content-type"].startswith("application/json")
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    [delivery] = await hooks.log(webhook["id"])
    assert delivery["status"] == "delivered"
    assert delivery["message_id"] == request.message_id == f"msg_{job_id[4:]}_1"
    assert (delivery["job_id"], delivery["event_seq"]) == (job_id, 1)
    [attempt] = delivery["attempts"]
    assert (attempt["number"], attempt["status_code"], attempt["error"]) == (1, 202, None)
    assert attempt["response_excerpt"] == "thanks ��"
    shown = await hooks.user.get(f"/webhooks/{webhook['id']}/deliveries/{delivery['id']}")
    assert shown.json()["payload"] == payload
    await hooks.deliver()
    assert len(receiver.requests) == 1


async def test_filters_and_owners(hooks: Any, receiver: Any, submit: Any) -> None:
    other = await hooks.service.user("bob")
    await hooks.make(receiver.url("/cancelled"), events=["job.cancelled"])
    await hooks.make(receiver.url("/labelled"), labels={"team": "vision"})
    await hooks.make(receiver.url("/off"), active=False)
    job_id = await submit(hooks.user)
    labelled = await submit(hooks.user, labels={"team": "vision", "x": "y"})
    await submit(other, labels={"team": "vision"})
    await hooks.user.post(f"/jobs/{job_id}/cancel")
    await hooks.deliver()
    told = sorted((r.path, json.loads(r.body)["data"]["job"]["id"]) for r in receiver.requests)
    assert told == [("/cancelled", job_id), ("/labelled", labelled)]
    assert await hooks.service.sql("SELECT 1 FROM webhook_outbox") == []


async def test_a_large_event_stays_behind_its_link(
    hooks: Any, receiver: Any, worker: Any, submit: Any
) -> None:
    await hooks.make(receiver.url(), events=["job.event.found"])
    job_id = await submit(hooks.user)
    await worker.take(job_id)
    record = {"seq": 1, "time": 1.0, "type": "event", "kind": "found", "data": {"x": "y" * 30_000}}
    assert (await worker.telemetry(1, record | {"message": "m" * 5000})).status_code == 200
    await hooks.deliver()
    [request] = receiver.requests
    assert len(request.body.encode()) < 20_000
    payload = json.loads(request.body)
    event = payload["data"]["event"]
    assert (event["truncated"], event["data"], len(event["message"])) == (True, None, 1000)
    [whole] = await hooks.linked(payload)
    assert whole["data"]["x"] == "y" * 30_000


async def test_a_transaction_that_commits_late_is_not_missed(
    hooks: Any, receiver: Any, submit: Any
) -> None:
    from octrain_api.events.repository import EventRepository

    await hooks.make(receiver.url(), events=["job.event.*"])
    first, second = await submit(hooks.user), await submit(hooks.user)
    await hooks.deliver()

    async def append(session: Any, job_id: str) -> None:
        job = await session.get(Job, job_id, with_for_update=True)
        await EventRepository(session).append(job, kind="note", actor="test", message="here")

    async with hooks.service.database.transaction() as slow:
        await append(slow, first)
        async with hooks.service.database.transaction() as fast:
            await append(fast, second)
        await hooks.deliver()
        assert [r.message_id for r in receiver.requests] == [f"msg_{second[4:]}_2"]
    await hooks.deliver()
    assert [r.message_id for r in receiver.requests][1:] == [f"msg_{first[4:]}_2"]


async def test_failures_are_tried_again_later_under_the_same_id(
    hooks: Any, receiver: Any, submit: Any
) -> None:
    receiver.answer = lambda request, handler: (500, {}, b"broken")
    webhook = await hooks.make(receiver.url())
    await submit(hooks.user)
    for tries in (1, 2):
        await hooks.deliver()
        await hooks.deliver()
        assert len(receiver.requests) == tries, "not before its time"
        [row] = await hooks.service.sql(
            "SELECT extract(epoch FROM next_attempt_at - now()) AS pause FROM webhook_deliveries"
        )
        assert 0.7 * 5 * 4 ** (tries - 1) < row.pause <= 1.2 * 5 * 4 ** (tries - 1)
        await hooks.make_due()
    state = await hooks.show(webhook["id"])
    assert (state["failures"], state["disabled_at"]) == (2, None)
    receiver.answer = lambda request, handler: (200, {}, b"")
    await hooks.deliver()
    [delivery] = await hooks.log(webhook["id"])
    assert [a["status_code"] for a in delivery["attempts"]] == [500, 500, 200]
    assert [a["number"] for a in delivery["attempts"]] == [1, 2, 3]
    assert delivery["attempts"][0]["response_excerpt"] == "broken"
    assert delivery["status"] == "delivered"
    assert len({r.message_id for r in receiver.requests}) == 1
    for request in receiver.requests:
        Verifier(webhook["secret"]).verify(request.body, request.headers)
    state = await hooks.show(webhook["id"])
    assert (state["failures"], state["failing_since"]) == (0, None)


async def test_it_is_given_up_in_the_end(hooks: Any, receiver: Any, submit: Any) -> None:
    receiver.answer = lambda request, handler: (404, {}, b"")
    webhook = await hooks.make(receiver.url())
    await submit(hooks.user)
    await hooks.deliver()
    await hooks.service.sql(
        "UPDATE webhook_deliveries SET queued_at = now() - interval '3 days', "
        "next_attempt_at = now()"
    )
    await hooks.deliver()
    [delivery] = await hooks.log(webhook["id"])
    assert (delivery["status"], delivery["next_attempt_at"]) == ("failed", None)
    assert "Given up" in delivery["detail"]
    # What could not even be tried in that time, and what ended long ago.
    await hooks.user.patch(f"/webhooks/{webhook['id']}", json={"active": False})
    await hooks.service.sql(
        "UPDATE webhook_deliveries SET status = 'pending', next_attempt_at = now(), ended_at = NULL"
    )
    hooks.use()
    await hooks.deliver()
    assert [d["status"] for d in await hooks.log(webhook["id"])] == ["failed"]
    await hooks.service.sql("UPDATE webhook_deliveries SET ended_at = now() - interval '31 days'")
    hooks.use()
    await hooks.deliver()
    assert await hooks.log(webhook["id"]) == []
    assert len(receiver.requests) == 2


async def test_retry_after_holds_the_whole_endpoint_back(
    hooks: Any, receiver: Any, submit: Any
) -> None:
    receiver.answer = lambda request, handler: (429, {"Retry-After": "600"}, b"")
    webhook = await hooks.make(receiver.url())
    await submit(hooks.user)
    await hooks.deliver()
    await submit(hooks.user)
    await hooks.deliver()
    assert len(receiver.requests) == 1
    [row] = await hooks.service.sql(
        "SELECT extract(epoch FROM w.not_before - now()) AS peace, "
        "extract(epoch FROM max(d.next_attempt_at) - now()) AS pause "
        "FROM webhooks w JOIN webhook_deliveries d ON d.webhook_id = w.id GROUP BY w.id"
    )
    assert 590 < row.peace <= 600
    assert 590 < row.pause <= 600
    receiver.answer = lambda request, handler: (200, {}, b"")
    await hooks.service.sql("UPDATE webhooks SET not_before = now()")
    await hooks.deliver()
    assert len(receiver.requests) == 2, "the second job's, while the first one waits its time"
    assert (await hooks.show(webhook["id"]))["not_before"] is None
    far = "Fri, 31 Dec 2100 23:59:59 GMT"
    receiver.answer = lambda request, handler: (503, {"Retry-After": far}, b"")
    await hooks.make_due()
    await hooks.deliver()
    [row] = await hooks.service.sql(
        "SELECT extract(epoch FROM not_before - now()) AS peace FROM webhooks"
    )
    assert 43_000 < row.peace <= 43_200, "nobody is waited for longer than the longest pause"


async def test_gone_and_failing_for_long_disable_it(hooks: Any, receiver: Any, submit: Any) -> None:
    second = await hooks.make(receiver.url("/watch"), events=["job.event.webhook_disabled"])
    receiver.answer = lambda request, handler: (410 if request.path == "/hook" else 200, {}, b"")
    webhook = await hooks.make(receiver.url(), events=["job.queued"])
    job_id = await submit(hooks.user)
    await hooks.deliver()
    state = await hooks.show(webhook["id"])
    assert "410 Gone" in state["disabled_reason"]
    assert state["active"] is True
    await hooks.deliver()
    [told] = [r for r in receiver.requests if r.path == "/watch"]
    data = json.loads(told.body)["data"]
    assert data["event"]["data"]["webhook_id"] == webhook["id"]
    events = (await hooks.user.get(f"/jobs/{job_id}/events")).json()["items"]
    assert [e["kind"] for e in events][-1] == "webhook_disabled"
    await submit(hooks.user)
    await hooks.deliver()
    [delivery] = await hooks.log(webhook["id"])
    assert delivery["status"] == "failed"
    path = f"/webhooks/{webhook['id']}/deliveries/{delivery['id']}/redeliver"
    refused = await hooks.user.post(path)
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/webhook-disabled")
    await hooks.user.patch(f"/webhooks/{webhook['id']}", json={"active": True})
    assert (await hooks.show(webhook["id"]))["disabled_at"] is None

    receiver.answer = lambda request, handler: (500, {}, b"")
    for _ in range(12):
        await submit(hooks.user)
    await hooks.deliver()
    await hooks.service.sql("UPDATE webhooks SET failures = 9 WHERE id = :id", id=webhook["id"])
    await hooks.make_due()
    await hooks.deliver()
    assert (await hooks.show(webhook["id"]))["disabled_at"] is None, "many, but not for long"
    await hooks.service.sql(
        "UPDATE webhooks SET failing_since = now() - interval '5 days' WHERE id = :id",
        id=webhook["id"],
    )
    await hooks.make_due()
    await hooks.deliver()
    state = await hooks.show(webhook["id"])
    assert "attempts in a row failed" in state["disabled_reason"]
    assert {d["status"] for d in await hooks.log(webhook["id"])} == {"failed"}
    assert (await hooks.show(second["id"]))["failures"] == 0


async def test_a_test_call(hooks: Any, receiver: Any) -> None:
    webhook = await hooks.make(receiver.url(), active=False)
    answer = await hooks.user.post(f"/webhooks/{webhook['id']}/test")
    assert answer.status_code == 202
    assert (answer.json()["status"], answer.json()["type"]) == ("pending", "webhook.test")
    await hooks.deliver()
    [request] = receiver.requests
    payload = Verifier(webhook["secret"]).verify(request.body, request.headers)
    assert payload["type"] == "webhook.test"
    receiver.answer = lambda request, handler: (500, {}, b"")
    failed = (await hooks.user.post(f"/webhooks/{webhook['id']}/test")).json()
    await hooks.deliver()
    shown = await hooks.user.get(f"/webhooks/{webhook['id']}/deliveries/{failed['id']}")
    assert (shown.json()["status"], shown.json()["attempt_count"]) == ("failed", 1)
    assert (await hooks.show(webhook["id"]))["failures"] == 0


async def test_redelivery_of_one_and_of_a_window(hooks: Any, receiver: Any, submit: Any) -> None:
    webhook = await hooks.make(receiver.url())
    await submit(hooks.user)
    await hooks.deliver()
    [delivery] = await hooks.log(webhook["id"])
    path = f"/webhooks/{webhook['id']}/deliveries"
    answer = await hooks.user.post(f"{path}/{delivery['id']}/redeliver")
    assert (answer.status_code, answer.json()["status"]) == (202, "pending")
    await hooks.deliver()
    assert [r.message_id for r in receiver.requests] == [delivery["message_id"]] * 2
    [delivery] = await hooks.log(webhook["id"])
    assert [a["number"] for a in delivery["attempts"]] == [1, 2]
    await hooks.service.sql(
        "UPDATE webhook_deliveries SET claimed_until = now() + interval '1 minute'"
    )
    refused = await hooks.user.post(f"{path}/{delivery['id']}/redeliver")
    assert refused.json()["type"] == "/problems/delivery-in-flight"
    assert (await hooks.user.post(f"{path}/whd_none/redeliver")).status_code == 404

    await submit(hooks.user)
    await submit(hooks.user)
    await hooks.loop.tick(hooks.sender)
    await hooks.loop.settle()
    await hooks.service.sql(
        "UPDATE webhook_deliveries SET status = 'failed', claimed_until = NULL, ended_at = now()"
    )
    window = {"since": delivery["created_at"], "until": delivery["created_at"]}
    path = f"/webhooks/{webhook['id']}/redeliver"
    assert (await hooks.user.post(path, json=window)).json() == {"count": 0}
    assert (await hooks.user.post(path, json={"since": "2026-01-01T00:00:00"})).status_code == 422
    answer = await hooks.user.post(path, json={"since": delivery["created_at"]})
    assert answer.json() == {"count": 3}
    before = len(receiver.requests)
    await hooks.deliver()
    assert len(receiver.requests) == before + 3


async def test_rotated_secrets_sign_until_their_time(
    hooks: Any, receiver: Any, submit: Any
) -> None:
    webhook = await hooks.make(receiver.url())
    new = (await hooks.user.post(f"/webhooks/{webhook['id']}/rotate")).json()["secret"]
    await submit(hooks.user)
    await hooks.deliver()
    for secret in (webhook["secret"], new):
        Verifier(secret).verify(receiver.requests[0].body, receiver.requests[0].headers)
    await hooks.service.sql(
        "UPDATE webhooks SET old_secrets = jsonb_set(old_secrets, '{0,until}', "
        "to_jsonb(CAST(now() - interval '1 second' AS text)))"
    )
    await submit(hooks.user)
    await hooks.deliver()
    request = receiver.requests[1]
    Verifier(new).verify(request.body, request.headers)
    with pytest.raises(Exception, match="No matching signature"):
        Verifier(webhook["secret"]).verify(request.body, request.headers)
