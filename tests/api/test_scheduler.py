"""Placement in the database: order, batches, fairness, and what is told of those that wait."""

from __future__ import annotations

import asyncio
import itertools
from datetime import datetime
from typing import Any

from octrain_api.controller.plan import Choice
from octrain_api.controller.queue import QueueRepository
from octrain_api.controller.scheduler import Scheduler
from octrain_api.jobs.placing import place_many
from octrain_api.settings import SchedulerSettings


async def test_priority_then_age(worker: Any, user: Any, submit: Any) -> None:
    await worker.register(cpu_slots=2)
    low = await submit(user, priority=-1)
    old, young, late = await submit(user), await submit(user), await submit(user)
    high = await submit(user, priority=5)
    assert await worker.schedule() == 2
    jobs = {j["id"]: j for j in (await user.get("/jobs")).json()["items"]}
    assert {i for i, job in jobs.items() if job["status"] == "starting"} == {high, old}
    for waiting in (young, late, low):
        assert (
            jobs[waiting]["waiting_for"] == "a free CPU slot: node-a has all 2 CPU slot(s) in use"
        )
    assert jobs[high]["waiting_for"] is None
    assert jobs[high]["device"] == "cpu"
    assert await worker.schedule() == 0


async def test_what_a_job_waits_for_is_news_once(worker: Any, user: Any, submit: Any) -> None:
    await submit(user)
    waiting = await submit(user)
    await worker.schedule()
    version = (await user.get(f"/jobs/{waiting}")).json()["version"]
    await worker.schedule()
    assert (await user.get(f"/jobs/{waiting}")).json()["version"] == version


async def test_two_schedulers_at_once_place_each_job_once(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    await worker.register(cpu_slots=3)
    for _ in range(6):
        await submit(user)
    settings = lone_service.settings
    schedulers = [
        Scheduler(lone_service.database, settings.controller, settings.scheduler) for _ in range(4)
    ]
    await asyncio.gather(*(scheduler.run() for scheduler in schedulers))
    rows = await lone_service.sql("SELECT job_id, fencing_token FROM attempts")
    assert len(rows) == len({row.job_id for row in rows}) == 3
    assert len({row.fencing_token for row in rows}) == 3
    assert len(await lone_service.sql("SELECT 1 FROM outbox")) == 3


async def test_silent_and_draining_nodes_get_nothing(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user)
    await lone_service.sql("UPDATE nodes SET wanted = 'drain'")
    assert await worker.schedule() == 0
    heartbeat = await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    assert heartbeat.json()["wanted"] == "drain"
    await lone_service.sql(
        "UPDATE nodes SET wanted = 'run', last_heartbeat_at = now() - interval '31 seconds'"
    )
    assert await worker.schedule() == 0
    assert "none of the registered" in (await user.get(f"/jobs/{job_id}")).json()["waiting_for"]
    await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={"active_attempts": []})
    assert await worker.schedule() == 1


async def test_private_checkpoints_bind_a_job_to_its_node(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    await worker.register("private", private_roots=True)
    await lone_service.sql("UPDATE nodes SET wanted = 'drain' WHERE name = 'node-a'")
    job_id = await submit(user)
    await worker.take(job_id)
    store = lone_service.settings.storage.artifact_url
    await worker.post(
        "artifacts",
        kind="checkpoint",
        name="step-00000005",
        step=5,
        url=f"{store}/{worker.attempt['artifact_prefix']}/checkpoints/step-00000005",
        files=[{"path": "x", "size": 1, "sha256": "0" * 64}],
    )
    await worker.finish("stopped", "stopped_by_request", step=5)
    await lone_service.sql(
        "UPDATE nodes SET wanted = CASE name WHEN 'node-a' THEN 'run' ELSE 'drain' END"
    )
    assert await worker.schedule() == 0
    assert "its node" in (await user.get(f"/jobs/{job_id}")).json()["waiting_for"]
    await lone_service.sql("UPDATE nodes SET wanted = 'run'")
    assert await worker.schedule() == 1


async def test_nodes_are_listed_with_what_is_free(worker: Any, user: Any, running_job: str) -> None:
    await worker.register(
        "gpu",
        device_kinds=["cpu", "cuda"],
        gpus=[{"index": 0, "name": "H200", "memory_bytes": 1, "compute_capability": "9.0"}],
    )
    nodes = {node["name"]: node for node in (await user.get("/nodes")).json()["items"]}
    assert (nodes["node-a"]["live"], nodes["node-a"]["cpu_slots_used"]) == (True, 1)
    assert nodes["node-a"]["engines"]["te"]["ok"] is False
    assert (nodes["gpu"]["gpus"][0]["name"], nodes["gpu"]["gpus_used"]) == ("H200", [])


async def test_each_rank_of_a_cpu_job_holds_a_slot(worker: Any, user: Any, submit: Any) -> None:
    await worker.register("node-a", cpu_slots=3)
    recipe = {"engine": "emulated"}
    several = await submit(user, recipe=recipe, resources={"device": "cpu", "cpu_ranks": 2})
    assert await worker.schedule() == 1
    node = next(n for n in (await user.get("/nodes")).json()["items"] if n["name"] == "node-a")
    assert (node["cpu_slots"], node["cpu_slots_used"]) == (3, 2)
    waiting = await submit(user, recipe=recipe, resources={"device": "cpu", "cpu_ranks": 2})
    single = await submit(user, recipe=recipe, resources={"device": "cpu"})
    # The last free slot is none for two ranks, and one for the job behind them.
    assert await worker.schedule() == 1
    jobs = {job: (await user.get(f"/jobs/{job}")).json() for job in (several, waiting, single)}
    assert [jobs[job]["status"] for job in (several, waiting, single)] == [
        "starting",
        "queued",
        "starting",
    ]
    assert "2 free CPU slots" in jobs[waiting]["waiting_for"]
    assert await worker.schedule() == 0


GPU_NODE: dict[str, Any] = {
    "device_kinds": ["cpu", "cuda"],
    "cpu_slots": 4,
    "gpus": [
        {"index": i, "name": "H200", "memory_bytes": 1, "compute_capability": "9.0"}
        for i in range(4)
    ],
}


def _gpus(count: int) -> dict[str, Any]:
    return {"device": "cuda", "gpus": count}


async def test_a_job_of_many_gpus_is_not_starved(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """Small jobs come for ever; the large one runs as soon as those before it have ended."""
    settings = lone_service.settings
    worker._scheduler = Scheduler(
        lone_service.database, settings.controller, SchedulerSettings(reserve_after=60)
    )
    await worker.register("gpu", **GPU_NODE)
    small = [await submit(user, resources=_gpus(1)) for _ in range(4)]
    assert await worker.schedule() == 4
    large = await submit(user, resources=_gpus(4))
    claims = []
    for job_id in small:
        await worker.claim(await worker.placed(job_id))
        claims.append(worker.attempt)

    async def end_one() -> None:
        worker.attempt = claims.pop(0)
        await worker.finish("succeeded", "completed")

    late = await submit(user, resources=_gpus(1))
    await end_one()
    assert await worker.schedule() == 1, "it has not waited for a minute yet"
    assert (await user.get(f"/jobs/{late}")).json()["status"] == "starting"
    await lone_service.advance(61)
    await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    later = await submit(user, resources=_gpus(1))
    on_cpu = await submit(user, resources={"device": "cpu"})
    await end_one()
    assert await worker.schedule() == 1
    assert (await user.get(f"/jobs/{on_cpu}")).json()["status"] == "starting"
    job = (await user.get(f"/jobs/{later}")).json()
    assert job["waiting_for"].endswith("gpu has 1 of 4 GPU(s) free, kept for another job")
    await end_one()
    await end_one()
    await worker.claim(await worker.placed(late))
    await worker.finish("succeeded", "completed")
    assert await worker.schedule() == 1
    assert (await user.get(f"/jobs/{large}")).json()["status"] == "starting"


async def test_position_and_reason_are_true_at_the_tick(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    settings = lone_service.settings
    worker._scheduler = Scheduler(
        lone_service.database, settings.controller, SchedulerSettings(refresh=0)
    )
    first, second = await submit(user), await submit(user)
    fresh = (await user.get(f"/jobs/{first}")).json()
    assert (fresh["queue_position"], fresh["waiting_for"]) == (1, "the scheduler")
    assert fresh["queue_as_of"] is None
    await worker.schedule()
    answer = await user.get(f"/jobs/{second}")
    job = answer.json()
    assert (job["queue_position"], job["waiting_for"]) == (
        1,
        "a free CPU slot: node-a has all 1 CPU slot(s) in use",
    )
    [row] = await lone_service.sql("SELECT as_of FROM queue_groups")
    assert datetime.fromisoformat(job["queue_as_of"]) == row.as_of
    await worker.schedule()
    again = (await user.get(f"/jobs/{second}")).json()
    assert again["queue_as_of"] > job["queue_as_of"]
    # A change of the reason alone is a change of the representation.
    await lone_service.sql("UPDATE queue_groups SET waiting_for = 'something else'")
    headers = {"If-None-Match": answer.headers["ETag"]}
    assert (await user.get(f"/jobs/{second}", headers=headers)).status_code == 200
    await user.post(f"/jobs/{second}/cancel")
    await worker.schedule()
    assert not await lone_service.sql("SELECT 1 FROM queue_groups")


async def test_a_full_batch_is_followed_by_the_next(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    settings = lone_service.settings
    scheduler = Scheduler(lone_service.database, settings.controller, SchedulerSettings(batch=2))
    await worker.register(cpu_slots=3)
    for _ in range(5):
        await submit(user)
    assert [await scheduler.tick() for _ in range(3)] == [(2, True), (1, False), (0, False)]


async def test_placing_makes_the_same_row_and_event_as_the_table(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """The set-based edge leaves no queue state behind and tells the same story."""
    limits = {"max_queue_time_seconds": 60, "stall_timeout_seconds": 77, "lease_ttl_seconds": 99}
    job_id = await submit(user, limits=limits)
    await lone_service.sql("UPDATE jobs SET next_attempt_at = now(), reason = 'x', detail = 'y'")
    await worker.schedule()
    [row] = await lone_service.sql(
        "SELECT j.status, j.reason, j.detail, j.next_attempt_at, j.queue_deadline_at, j.version, "
        "j.sequence, j.attempt, a.number, a.status AS placed, a.lease_seconds, a.stall_seconds, "
        "a.fencing_token > 0 AS fenced, o.task_id, o.payload, a.id AS attempt_id "
        "FROM jobs j JOIN attempts a ON a.job_id = j.id JOIN outbox o ON o.attempt_id = a.id"
    )
    assert (row.status, row.reason, row.detail) == ("starting", None, None)
    assert (row.next_attempt_at, row.queue_deadline_at) == (None, None)
    assert (row.version, row.sequence, row.attempt, row.number) == (3, 2, 1, 1)
    assert (row.placed, row.lease_seconds, row.stall_seconds, row.fenced) == (
        "placed",
        99,
        77,
        True,
    )
    assert row.task_id == f"{job_id}:1"
    assert row.payload == {"job_id": job_id, "attempt_id": row.attempt_id, "attempt": 1}
    event = (await user.get(f"/jobs/{job_id}/events")).json()["items"][-1]
    assert (event["seq"], event["kind"], event["actor"]) == (2, "status", "scheduler")
    assert (event["attempt"], event["message"]) == (1, "Placed on node node-a.")
    assert event["data"].items() >= {"from": "queued", "to": "starting", "device": "cpu"}.items()


async def test_a_plan_is_checked_again_under_the_locks(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """Whatever has changed since it was made: slots, GPUs, the jobs, the node."""
    await worker.register("gpu", **GPU_NODE | {"cpu_slots": 1})
    async with lone_service.database.session() as session:
        [node] = await QueueRepository(session).describe([worker.node_id])
    cpu = [await submit(user, resources={"device": "cpu"}) for _ in range(2)]
    gpus = [await submit(user, resources=_gpus(3)) for _ in range(2)]
    gone = await submit(user, resources=_gpus(1))
    await user.post(f"/jobs/{gone}/cancel")
    moved = await submit(user, resources=_gpus(1))
    await lone_service.sql("UPDATE jobs SET need = need || '@node_x' WHERE id = :id", id=moved)
    choices = [
        *(Choice(job, "cpu:1:emulated", node, "cpu", 0, 1) for job in cpu),
        *(Choice(job, "cuda:3:emulated", node, "cuda", 3, 0) for job in gpus),
        *(Choice(job, "cuda:1:emulated", node, "cuda", 1, 0) for job in (gone, moved)),
    ]

    async def place(chosen: list[Choice]) -> list[str]:
        async with lone_service.database.transaction() as session:
            return [placed.job_id for placed in await place_many(session, chosen)]

    for change in ("wanted = 'drain'", "quarantined_since = now()", "described_at = now()"):
        await lone_service.sql(f"UPDATE nodes SET {change} WHERE name = 'gpu'")
        assert await place(choices) == [], change
        await lone_service.sql(
            "UPDATE nodes SET wanted = 'run', quarantined_since = NULL, "
            "described_at = to_timestamp(:at / 1e6) WHERE name = 'gpu'",
            at=node.described,
        )
    assert await place(choices) == [cpu[0], gpus[0]]
    assert await place(choices) == [], "nothing is placed twice, and nothing too many"
    [row] = await lone_service.sql("SELECT gpu_indices FROM attempts WHERE device = 'cuda'")
    assert row.gpu_indices == [0, 1, 2]


async def _register_many(service: Any, count: int) -> None:
    """As so many nodes do when the service comes back after a while."""
    await service.sql(
        "INSERT INTO nodes (id, name, owner, boot_id, hostname, version, device_kinds, cpu_slots, "
        "gpus, engines, roots, private_roots) SELECT 'many_' || n, 'many-' || n, 'o', 'b', 'h', "
        """'1', '{cpu}', 1, '[]', '{"amp": {"ok": true}}', '{}', false """
        "FROM generate_series(1, :count) AS n ON CONFLICT (id) DO UPDATE SET described_at = now()",
        count=count,
    )


async def test_no_tick_reads_what_a_thousand_nodes_can_do(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """Each reads some, and none decides anything before all are known: the only node that can run
    the job may be among the last."""
    await _register_many(lone_service, 600)
    job_id = await submit(user)
    settings = lone_service.settings
    scheduler = Scheduler(lone_service.database, settings.controller, settings.scheduler)
    assert [await scheduler.tick() for _ in range(3)] == [(0, True), (0, True), (1, False)]
    [event] = await lone_service.sql(
        "SELECT * FROM events WHERE job_id = :job AND seq > 1", job=job_id
    )
    assert event.data["node"] == "node-a"
    assert not await lone_service.sql("SELECT 1 FROM queue_groups WHERE waiting_for LIKE '%node%'")


async def test_a_new_leader_knows_the_nodes_before_it_acts(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    await _register_many(lone_service, 600)
    await submit(user)
    settings = lone_service.settings
    scheduler = Scheduler(lone_service.database, settings.controller, settings.scheduler)
    await scheduler.prepare()
    assert not await lone_service.sql("SELECT 1 FROM attempts"), "nor is anything done by it"
    assert not await lone_service.sql("SELECT 1 FROM queue_groups")
    assert await scheduler.tick() == (1, False)
    # All of them come back at one time.
    await _register_many(lone_service, 600)
    await submit(user)
    assert [(await scheduler.tick())[1] for _ in range(3)] == [True, True, False]


async def test_one_tick_places_in_several_transactions(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """Each of 25 at most; what the time of a tick does not suffice for is the next one's."""
    await worker.register(cpu_slots=60)
    jobs = [await submit(user) for _ in range(60)]
    assert await worker.schedule() == 60
    rows = await lone_service.sql("SELECT job_id, created_at FROM attempts ORDER BY created_at")
    assert {row.job_id for row in rows} == set(jobs)
    together = [len(list(each)) for _, each in itertools.groupby(rows, lambda row: row.created_at)]
    assert sum(together) == 60
    assert max(together) == 25
    order = [row.job_id for row in rows]
    assert set(order[:25]) == set(jobs[:25]), "the oldest first"
