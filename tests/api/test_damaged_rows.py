"""Rows that no code of ours wrote: the job or node that they are about pays for it, nobody else.

Each is damaged in Postgres itself, as a restore, another version or a hand might.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import InternalError

from octrain_api.controller.relay import CelerySender, relay
from octrain_api.controller.scheduler import Scheduler
from octrain_api.database import Database
from octrain_api.settings import BrokerSettings, SchedulerSettings

_EARLIER = (
    "INSERT INTO attempts (id, job_id, number, node_id, status, fencing_token, device, "
    "gpu_indices, lease_seconds) SELECT 'att_' || :job, :job, {number}, "
    "(SELECT id FROM nodes LIMIT 1), '{status}', 1, 'cpu', '{{}}', 900"
)
JOBS = {
    "a need that is none": "UPDATE jobs SET need = 'garbage' WHERE id = :job",
    "a need of no ranks": "UPDATE jobs SET need = 'cpu:0:emulated' WHERE id = :job",
    "a need of no device": "UPDATE jobs SET need = 'tpu:1:emulated' WHERE id = :job",
    "no need": "UPDATE jobs SET need = '' WHERE id = :job",
    "an empty spec": "UPDATE jobs SET spec = '{}' WHERE id = :job",
    "a spec that is a text": """UPDATE jobs SET spec = '"lost"' WHERE id = :job""",
    "a lease that is no number": "UPDATE jobs SET spec = jsonb_set(CAST(spec AS jsonb), "
    """'{limits,lease_ttl_seconds}', '"long"') WHERE id = :job""",
    "the number of its attempt is taken": _EARLIER.format(number=1, status="ended"),
    "queued while its attempt lives": _EARLIER.format(number=7, status="running"),
}


async def _status(user: Any, job_id: str) -> dict[str, Any]:
    job = (await user.get(f"/jobs/{job_id}")).json()
    return {name: job[name] for name in ("status", "reason", "detail")}


@pytest.mark.parametrize("damage", JOBS)
async def test_a_damaged_job_ends_and_the_others_are_placed(
    worker: Any, user: Any, submit: Any, lone_service: Any, damage: str
) -> None:
    await worker.register(cpu_slots=4)
    before = await submit(user)
    bad = await submit(user)
    after = [await submit(user), await submit(user, priority=-1)]
    await lone_service.sql(JOBS[damage], job=bad)
    for path in ("/jobs", f"/jobs/{bad}", f"/jobs/{before}"):
        assert (await user.get(path)).status_code == 200
    admin = lone_service.client(await lone_service.key("root", "admin"))
    scraped = await admin.get("http://octrain/metrics")
    assert scraped.status_code == 200, scraped.text
    assert await worker.schedule() == 3
    for job_id in (before, *after):
        assert (await _status(user, job_id))["status"] == "starting"
    ended = await _status(user, bad)
    assert (ended["status"], ended["reason"]) == ("failed", "internal_error")
    assert "damaged" in ended["detail"]
    assert "\n" not in ended["detail"]
    [event] = await lone_service.sql(
        "SELECT * FROM events WHERE job_id = :job ORDER BY seq DESC LIMIT 1", job=bad
    )
    assert (event.actor, event.data["to"]) == ("scheduler", "failed")
    assert not await lone_service.sql(
        "SELECT 1 FROM attempts WHERE job_id = :job AND status <> 'ended'", job=bad
    )
    # It holds nobody up any more, and is nowhere counted as waiting.
    later = await submit(user)
    assert await worker.schedule() == 1
    assert (await _status(user, later))["status"] == "starting"
    assert not await lone_service.sql("SELECT 1 FROM queue_groups WHERE need = 'garbage'")


async def test_a_job_that_cannot_even_be_ended_is_left_alone(
    worker: Any, user: Any, submit: Any, lone_service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its events are ahead of its own count of them, so nothing can be written about it. It is the
    first of the queue, and every place of the node would be for it."""
    bad = [await submit(user, priority=9) for _ in range(3)]
    good = await submit(user)
    for job_id in bad:
        await lone_service.sql("UPDATE jobs SET sequence = 0 WHERE id = :job", job=job_id)
    assert await worker.schedule() == 1
    await worker.schedule()
    assert (await _status(user, good))["status"] == "starting"
    for job_id in bad:
        assert (await _status(user, job_id))["status"] == "queued"
        tried = [r for r in caplog.records if r.getMessage() == f"job {job_id} cannot be placed"]
        assert len(tried) == 1, "once, not at each tick"


async def test_what_is_no_jobs_fault_ends_none(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """A database that is read-only for a while, as one that has just taken over may be."""
    job_id = await submit(user)
    [row] = await lone_service.sql("SELECT current_database() AS name")
    settings = lone_service.settings
    await lone_service.sql(f"ALTER DATABASE {row.name} SET default_transaction_read_only = on")
    database = Database(settings.database)
    scheduler = Scheduler(database, settings.controller, settings.scheduler)
    with pytest.raises(InternalError, match="read-only"):
        await scheduler.tick()
    await lone_service.sql(f"ALTER DATABASE {row.name} SET default_transaction_read_only = off")
    await database.close()
    database = Database(settings.database)
    scheduler._database = database
    assert await scheduler.run() == 1
    await database.close()
    assert (await _status(user, job_id))["status"] == "starting"


NODES = {
    "GPUs that are none": """UPDATE nodes SET gpus = '{"a": 1}'""",
    "a GPU without an index": """UPDATE nodes SET gpus = '[{"name": "H200"}]'""",
    "engines in a list": "UPDATE nodes SET engines = '[]'",
    "an engine that is a truth": """UPDATE nodes SET engines = '{"emulated": true}'""",
}


@pytest.mark.parametrize("damage", NODES)
async def test_a_damaged_node_gets_nothing_until_it_registers_again(
    worker: Any, user: Any, submit: Any, lone_service: Any, damage: str
) -> None:
    bad = worker.node_id
    gpu = {"index": 0, "name": "H200", "memory_bytes": 1}
    await worker.register("node-a", device_kinds=["cpu", "cuda"], gpus=[gpu])
    await worker.register("node-b")
    await lone_service.sql(f"{NODES[damage]} WHERE id = :node", node=bad)
    anywhere = await submit(user, resources={"device": "auto"})
    await user.post(f"/jobs/{anywhere}/cancel")
    first, second = await submit(user), await submit(user)
    assert await worker.schedule() == 1
    [placed] = await lone_service.sql("SELECT node_id, job_id FROM attempts")
    assert (placed.node_id, placed.job_id) == (worker.node_id, first)
    nodes = (await user.get("/nodes")).json()["items"]
    assert {node["name"] for node in nodes} == {"node-a", "node-b"}
    await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={"stopping": True})
    await worker.schedule()
    waits = (await user.get(f"/jobs/{second}")).json()["waiting_for"]
    assert "node-a has a registration that cannot be read" in waits
    await worker.register("node-a")
    assert await worker.schedule() == 1
    assert (await _status(user, second))["status"] == "starting"


async def test_a_round_of_the_reconciler_does_the_rest(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """Two jobs whose leases are over, of which one cannot be judged, and whose idle limit cannot be
    read; and a third that has waited too long."""
    await worker.register(cpu_slots=2)
    bad, good = await submit(user), await submit(user)
    await worker.take(bad)
    await worker.take(good)
    late = await submit(user, limits={"max_queue_time_seconds": 60})
    await lone_service.sql(
        "UPDATE jobs SET spec = jsonb_set(CAST(spec AS jsonb), '{limits}', "
        """'{"idle_gpu_timeout_seconds": "never"}') WHERE id = :job""",
        job=bad,
    )
    await lone_service.sql(
        "INSERT INTO gpu_activity SELECT id, now(), now() - interval '1 hour' FROM attempts"
    )
    await lone_service.sql("UPDATE jobs SET sequence = 0 WHERE id = :job", job=bad)
    await lone_service.advance(1000)
    await worker.reconcile()
    assert (await _status(user, good))["status"] == "queued"
    assert (await _status(user, late))["reason"] == "queue_time_exceeded"
    assert (await _status(user, bad))["status"] == "starting"


async def test_a_victim_that_cannot_be_paused_keeps_no_other(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    await worker.register(cpu_slots=2)
    settings = lone_service.settings
    worker._scheduler = Scheduler(
        lone_service.database, settings.controller, SchedulerSettings(preemption="pause")
    )
    low = [await submit(user), await submit(user)]
    for job_id in low:
        await worker.take(job_id)
    await lone_service.sql("UPDATE jobs SET sequence = 0 WHERE id = :job", job=low[1])
    high = await submit(user, priority=5, resources={"device": "cpu", "cpu_ranks": 2})
    assert await worker.schedule() == 0
    assert (await _status(user, low[0]))["reason"] == "preempted"
    assert (await _status(user, low[1]))["status"] == "starting"
    assert (await _status(user, high))["status"] == "queued"


async def test_a_message_that_cannot_be_sent_keeps_no_other(
    worker: Any, user: Any, submit: Any, lone_service: Any, redis_url: str
) -> None:
    await worker.register(cpu_slots=2)
    bad, good = await submit(user), await submit(user)
    await worker.schedule()
    attempt = await worker.placed(bad)
    await lone_service.sql(
        "UPDATE outbox SET payload = '[]', created_at = now() - interval '1 s' "
        "WHERE attempt_id = :attempt",
        attempt=attempt,
    )
    sender = CelerySender(BrokerSettings(url=redis_url))
    try:
        await relay(lone_service.database, lone_service.settings.controller, sender)
    finally:
        sender.close()
    rows = await lone_service.sql("SELECT attempt_id, sendings FROM outbox")
    assert {row.attempt_id: row.sendings for row in rows} == {
        attempt: 1,
        await worker.placed(good): 1,
    }
