"""Quotas per owner, and what is counted as used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octrain_api.controller.scheduler import Scheduler
from octrain_api.settings import QuotaSettings

GPU_NODE = {
    "device_kinds": ["cuda", "cpu"],
    "cpu_slots": 1,
    "gpus": [{"index": n, "name": "H200", "memory_bytes": 2**37} for n in range(4)],
}


@pytest.fixture
async def admin(lone_service: Any) -> Any:
    return lone_service.client(await lone_service.key("root", "admin"))


async def test_the_queue_of_an_owner_is_bounded(
    lone_service: Any, admin: Any, user: Any, submit: Any, spec: Any
) -> None:
    assert (await admin.put("/quotas/ada", json={"queued": 2})).json()["queued"] == 2
    first = await submit(user)
    again = {"headers": {"Idempotency-Key": "one"}}
    assert (await user.post("/jobs", json=spec, **again)).status_code == 201
    refused = await user.post("/jobs", json=spec)
    problem = refused.json()
    assert (refused.status_code, problem["type"]) == (403, "/problems/quota-exceeded")
    assert (problem["quota"], problem["limit"], problem["used"]) == ("queued", 2, 2)
    assert (await user.post("/jobs", json=spec, **again)).status_code == 200, "a replay is no job"
    await submit(await lone_service.user("eve"))
    await user.post(f"/jobs/{first}/cancel")
    assert (await user.post("/jobs", json=spec)).status_code == 201
    usage = (await user.get("/usage")).json()
    assert (usage["owner"], usage["queued"], usage["quotas"]["queued"]) == ("ada", 2, 2)
    await admin.delete("/quotas/ada")
    assert (await user.post("/jobs", json=spec)).status_code == 201
    assert (await admin.delete("/quotas/ada")).status_code == 404


async def test_a_draft_is_counted_when_it_starts(admin: Any, user: Any, spec: Any) -> None:
    await admin.put("/quotas/ada", json={"queued": 1})
    drafts = [(await user.post("/jobs?draft=true", json=spec)).json()["id"] for _ in range(2)]
    assert (await user.get("/usage")).json()["queued"] == 0
    assert (await user.post(f"/jobs/{drafts[0]}/start")).status_code == 200
    refused = await user.post(f"/jobs/{drafts[1]}/start")
    assert (refused.status_code, refused.json()["type"]) == (403, "/problems/quota-exceeded")
    assert (await user.get(f"/jobs/{drafts[1]}")).json()["status"] == "draft"


async def test_submissions_at_once_cannot_pass_the_bound(admin: Any, user: Any, spec: Any) -> None:
    await admin.put("/quotas/ada", json={"queued": 3})
    answers = await asyncio.gather(*(user.post("/jobs", json=spec) for _ in range(10)))
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [403] * 7


async def test_running_jobs_are_bounded_when_they_are_placed(
    lone_service: Any, admin: Any, worker: Any, user: Any, submit: Any
) -> None:
    await worker.register(cpu_slots=5)
    await admin.put("/quotas/ada", json={"running": 2})
    eve = await lone_service.user("eve")
    ada = [await submit(user) for _ in range(4)]
    other = await submit(eve)
    assert await worker.schedule() == 3
    jobs = {j["id"]: j for j in (await admin.get("/jobs")).json()["items"]}
    placed = [job_id for job_id in jobs if jobs[job_id]["status"] == "starting"]
    assert set(placed) == {ada[0], ada[1], other}
    waiting = jobs[ada[2]]
    assert waiting["waiting_for"].startswith("a running job of ada to end")
    assert await worker.schedule() == 0
    usage = (await admin.get("/usage/ada")).json()
    assert (usage["queued"], usage["running"]) == (2, 2)
    await worker.claim(await worker.placed(ada[0]))
    await worker.finish("succeeded", "completed")
    assert await worker.schedule() == 1
    await admin.put("/quotas/ada", json={})
    assert await worker.schedule() == 1
    assert (await user.get(f"/jobs/{ada[3]}")).json()["waiting_for"] is None


async def test_an_owner_at_the_bound_does_not_hold_others_back(
    lone_service: Any, admin: Any, worker: Any, user: Any, submit: Any
) -> None:
    """Many jobs of one owner before one job of another, in a queue of one need."""
    await worker.register(cpu_slots=2)
    await admin.put("/quotas/ada", json={"running": 1})
    for _ in range(20):
        await submit(user, priority=5)
    other = await submit(await lone_service.user("eve"))
    await worker.schedule()
    await worker.schedule()
    job = (await admin.get(f"/jobs/{other}")).json()
    assert job["status"] == "starting"


async def test_the_default_quota_is_everybodys(
    lone_service: Any, worker: Any, user: Any, submit: Any
) -> None:
    await worker.register(cpu_slots=5)
    for _ in range(2):
        await submit(user)
    await submit(await lone_service.user("eve"))
    settings = lone_service.settings
    scheduler = Scheduler(
        lone_service.database, settings.controller, settings.scheduler, QuotaSettings(running=1)
    )
    assert await scheduler.run() == 2


async def test_gpu_hours_are_counted_and_bounded(
    lone_service: Any, admin: Any, worker: Any, user: Any, submit: Any, spec: Any
) -> None:
    await worker.register("gpu", **GPU_NODE)
    gpus = {"resources": {"device": "cuda", "gpus": 3}, "recipe": {"engine": "amp"}}
    job_id = await submit(user, **gpus)
    await worker.take(job_id)
    await lone_service.advance(1800)
    live = (await user.get("/usage")).json()
    assert live["gpu_hours"] == pytest.approx(1.5, abs=0.02)
    await worker.finish("succeeded", "completed")
    ended = (await user.get("/usage")).json()
    assert ended["gpu_hours"] == pytest.approx(1.5, abs=0.02)
    assert (ended["cpu_hours"], ended["attempts"]) == (0, 1)
    await admin.put("/quotas/ada", json={"gpu_hours": 1.6})
    await submit(user)
    await admin.put("/quotas/ada", json={"gpu_hours": 1.4})
    refused = await user.post("/jobs", json=spec)
    assert (refused.status_code, refused.json()["quota"]) == (403, "gpu_hours")
    # Use outlives the job, and leaves the window with its day.
    await lone_service.sql("DELETE FROM jobs WHERE id = :id", id=job_id)
    assert (await user.post("/jobs", json=spec)).status_code == 403
    await lone_service.sql("UPDATE usage_days SET day = day - 30")
    assert (await user.post("/jobs", json=spec)).status_code == 201


async def test_cpu_slots_count_apart_and_unclaimed_attempts_not(
    lone_service: Any, worker: Any, user: Any, submit: Any
) -> None:
    await worker.register(cpu_slots=2)
    taken, left = [
        await submit(user, resources={"device": "cpu", "cpu_ranks": 2}) for _ in range(2)
    ]
    await worker.take(taken)
    await lone_service.advance(3600)
    running = (await user.get("/usage")).json()
    assert running["cpu_hours"] == pytest.approx(2, abs=0.04)
    await worker.finish("succeeded", "completed")
    await worker.schedule()
    await lone_service.advance(3600)
    await user.post(f"/jobs/{left}/cancel")
    usage = (await user.get("/usage")).json()
    assert usage["cpu_hours"] == pytest.approx(2, abs=0.04)
    assert (usage["gpu_hours"], usage["attempts"]) == (0, 1)


async def test_quotas_are_shown_and_checked(admin: Any) -> None:
    too_many = {"queued": 2**31}, {"running": 2**63 - 1}
    for body in ({"queued": -1}, {"gpu_hours": "NaN"}, {"jobs": 1}, *too_many):
        assert (await admin.put("/quotas/ada", json=body)).status_code == 422
    most = {"queued": 2**31 - 1, "running": 2**31 - 1}
    assert (await admin.put("/quotas/ada", json=most)).status_code == 200
    await admin.put("/quotas/eve", json={"running": 1, "gpu_hours": 2.5})
    await admin.put("/quotas/ada", json={})
    listed = (await admin.get("/quotas")).json()
    assert listed["default"] == {"queued": None, "running": None, "gpu_hours": None}
    assert [(item["owner"], item["running"]) for item in listed["items"]] == [
        ("ada", None),
        ("eve", 1),
    ]
