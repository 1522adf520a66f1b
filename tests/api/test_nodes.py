"""Nodes that are drained, set aside for repeated faults, and emptied for a higher priority."""

from __future__ import annotations

from typing import Any

import pytest

from octrain_api.controller.scheduler import Scheduler
from octrain_api.settings import SchedulerSettings


@pytest.fixture
async def admin(lone_service: Any) -> Any:
    return lone_service.client(await lone_service.key("root", "admin", "jobs:read"))


async def _job(user: Any, job_id: str) -> dict[str, Any]:
    return dict((await user.get(f"/jobs/{job_id}")).json())


async def test_a_drained_node_gets_nothing_and_finishes_what_it_has(
    worker: Any, user: Any, admin: Any, submit: Any, running_job: str
) -> None:
    answer = await admin.post(f"/nodes/{worker.node_id}/drain")
    assert (answer.status_code, answer.json()["wanted"]) == (200, "drain")
    beat = await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    assert beat.json()["wanted"] == "drain"
    assert (await worker.post("heartbeat")).json()["wanted"] == "run"
    waiting = await submit(user)
    await worker.finish("succeeded", "completed")
    assert await worker.schedule() == 0
    assert (await _job(user, waiting))["waiting_for"] == "an open node: node-a is drained"
    assert (await admin.post(f"/nodes/{worker.node_id}/undrain")).json()["wanted"] == "run"
    assert await worker.schedule() == 1
    assert (await admin.post("/nodes/node_none/drain")).status_code == 404
    assert (await user.post(f"/nodes/{worker.node_id}/drain")).status_code == 403


async def test_a_drain_can_send_jobs_back_to_the_queue(
    worker: Any, user: Any, admin: Any, submit: Any
) -> None:
    await worker.register(cpu_slots=2)
    taken = await submit(user)
    await worker.take(taken)
    unclaimed = await submit(user)
    await worker.schedule()
    answer = await admin.post(f"/nodes/{worker.node_id}/drain?release=true")
    assert answer.status_code == 200, answer.text
    job = await _job(user, unclaimed)
    assert (job["status"], job["attempts"][0]["reason"]) == ("queued", "node_drained")
    job = await _job(user, taken)
    assert (job["status"], job["reason"]) == ("pausing", "node_drained")
    heard = (await worker.post("heartbeat")).json()
    assert (heard["wanted"], heard["wanted_reason"]) == ("pause", "node_drained")
    await worker.finish("stopped", "stopped_by_request", step=5)
    job = await _job(user, taken)
    assert (job["status"], job["reason"], job["restarts"]) == ("queued", None, 0)
    assert job["attempts"][0]["reason"] == "node_drained"
    events = (await user.get(f"/jobs/{taken}/events")).json()["items"]
    assert "user:root" in [event["actor"] for event in events]
    await worker.register("node-b", cpu_slots=2)
    assert await worker.schedule() == 2


async def _crash(worker: Any, user: Any, submit: Any, reason: str = "trainer_crashed") -> str:
    job_id = str(await submit(user, limits={"max_restarts": 0}))
    await worker.take(job_id)
    await worker.finish("failed", reason, resumable=True)
    return job_id


async def _quarantined(user: Any) -> bool:
    return (await user.get("/nodes")).json()["items"][0]["quarantined_since"] is not None


async def test_a_node_of_repeated_faults_is_set_aside_until_released(
    worker: Any, user: Any, admin: Any, submit: Any
) -> None:
    await _crash(worker, user, submit)
    await _crash(worker, user, submit, "worker_lost")
    assert not await _quarantined(user)
    last = await _crash(worker, user, submit)
    assert await _quarantined(user)
    events = (await user.get(f"/jobs/{last}/events")).json()["items"]
    [event] = [event for event in events if event["kind"] == "node_set_aside"]
    assert event["data"]["node"] == "node-a"
    assert len(event["data"]["jobs"]) == 3
    waiting = await submit(user)
    assert await worker.schedule() == 0
    assert "until an administrator releases it" in (await _job(user, waiting))["waiting_for"]
    answer = await admin.post(f"/nodes/{worker.node_id}/release")
    assert answer.json()["quarantined_since"] is None
    assert await worker.schedule() == 1
    await worker.claim(await worker.placed(waiting))
    await worker.finish("failed", "trainer_crashed")
    assert not await _quarantined(user), "the count began anew"


async def test_other_ends_break_the_row(worker: Any, user: Any, submit: Any) -> None:
    for reason in ("trainer_crashed", "worker_lost", "data_invalid", "trainer_crashed"):
        await _crash(worker, user, submit, reason)
    await _crash(worker, user, submit)
    assert not await _quarantined(user)


async def test_faults_of_one_job_say_more_of_the_job(worker: Any, user: Any, submit: Any) -> None:
    job_id = await submit(user, limits={"max_restarts": 5, "restart_backoff_seconds": 0})
    for _ in range(5):
        await worker.take(job_id)
        await worker.finish("failed", "trainer_crashed", resumable=True)
    assert not await _quarantined(user)


async def test_a_machine_that_goes_down_has_had_one_fault(
    worker: Any, user: Any, submit: Any
) -> None:
    await worker.register(cpu_slots=4)
    for _ in range(4):
        await worker.take(await submit(user))
    await worker.register(cpu_slots=4, boot_id="boot-2")
    await worker.reconcile()
    rows = await worker.service.sql("SELECT 1 FROM attempts WHERE reason = 'worker_lost'")
    assert len(rows) == 4
    assert not await _quarantined(user)


async def test_old_faults_are_forgotten(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    for _ in range(3):
        await _crash(worker, user, submit)
        await lone_service.advance(1900)
        await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    assert not await _quarantined(user)


# --- preemption -----------------------------------------------------------------------------------

GPUS = {
    "device_kinds": ["cuda"],
    "cpu_slots": 0,
    "gpus": [{"index": i, "name": "H200", "memory_bytes": 1} for i in range(2)],
}


@pytest.fixture
async def gpus(worker: Any, lone_service: Any) -> Any:
    """A node of two GPUs under a scheduler that may pause lower priorities."""
    settings = lone_service.settings
    worker._scheduler = Scheduler(
        lone_service.database, settings.controller, SchedulerSettings(preemption="pause")
    )
    await worker.register("gpu", **GPUS)
    return worker


def _on(gpus: int, priority: int) -> dict[str, Any]:
    return {"resources": {"device": "cuda", "gpus": gpus}, "priority": priority}


async def test_a_higher_priority_pauses_the_lower_ones_it_needs(
    gpus: Any, user: Any, submit: Any
) -> None:
    low = [await submit(user, **_on(1, 0)), await submit(user, **_on(1, 1))]
    claims = [await gpus.take(job_id) for job_id in low]
    high = await submit(user, **_on(2, 5))
    late = await submit(user, **_on(1, 4))
    assert await gpus.schedule() == 0
    for job_id in low:
        job = await _job(user, job_id)
        assert (job["status"], job["reason"]) == ("pausing", "preempted")
        assert high in job["detail"]
        event = (await user.get(f"/jobs/{job_id}/events")).json()["items"][-1]
        assert event["actor"] == "scheduler"
        assert event["data"]["preempted_by"] == high
    told = (await user.get(f"/jobs/{high}/events")).json()["items"]
    assert {e["data"]["job_id"] for e in told if e["kind"] == "preempting"} == set(low)
    # The first that is free is kept for it, though the late one would fit.
    gpus.attempt = claims[0]
    assert (await gpus.post("heartbeat")).json()["wanted_reason"] == "preempted"
    await gpus.finish("stopped", "stopped_by_request", step=5)
    assert await gpus.schedule() == 0
    assert "kept for another job" in (await _job(user, late))["waiting_for"]
    gpus.attempt = claims[1]
    await gpus.finish("stopped", "stopped_by_request", step=5)
    assert await gpus.schedule() == 1
    assert (await _job(user, high))["status"] == "starting"
    for job_id in low:
        job = await _job(user, job_id)
        assert (job["status"], job["restarts"]) == ("queued", 0)
        assert job["attempts"][0]["reason"] == "preempted"


async def test_no_more_are_paused_than_needed_the_lowest_and_youngest_first(
    gpus: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    old = await submit(user, **_on(1, 1))
    await gpus.take(old)
    await lone_service.advance(10)
    await gpus.http.post(f"/nodes/{gpus.node_id}/heartbeat", json={})
    young = await submit(user, **_on(1, 1))
    await gpus.take(young)
    await submit(user, **_on(1, 2))
    for _ in range(3):
        await gpus.schedule()
    assert (await _job(user, old))["status"] == "starting"
    assert (await _job(user, young))["status"] == "pausing"


async def test_equal_priorities_and_too_little_room_pause_nobody(
    gpus: Any, user: Any, submit: Any
) -> None:
    low, equal = await submit(user, **_on(1, 0)), await submit(user, **_on(1, 3))
    for job_id in (equal, low):
        await gpus.take(job_id)
    await submit(user, **_on(2, 3))
    await gpus.schedule()
    assert {(await _job(user, j))["status"] for j in (low, equal)} == {"starting"}


async def test_without_leave_nobody_is_paused(
    worker: Any, user: Any, submit: Any, running_job: str
) -> None:
    await submit(user, priority=9)
    await worker.schedule()
    assert (await _job(user, running_job))["status"] == "running"


async def test_a_heartbeat_tells_of_attempts_whose_message_never_came(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """Not of those just placed, whose message is on its way, nor of claimed ones."""
    job_id = await submit(user)
    await worker.schedule()
    attempt_id = await worker.placed(job_id)
    assert (await _beat(worker))["placed"] == []
    await lone_service.advance(6)
    told = [{"attempt_id": attempt_id, "job_id": job_id, "attempt": 1}]
    assert (await _beat(worker))["placed"] == told
    await worker.claim(attempt_id)
    assert (await _beat(worker))["placed"] == []


async def test_a_node_that_shuts_down_is_given_nothing_more(
    worker: Any, user: Any, submit: Any
) -> None:
    """At once, not when its silence is noticed; and again as soon as it is back."""
    job_id = await submit(user)
    await _beat(worker, stopping=True)
    assert await worker.schedule() == 0
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert job["status"] == "queued"
    assert job["waiting_for"]
    await worker.register()
    assert await worker.schedule() == 1


async def _beat(worker: Any, **body: Any) -> dict[str, Any]:
    answer = await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
