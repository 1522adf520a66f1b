"""Leases, downtime, silence and states that nobody owns, by a database clock that tests move."""

from __future__ import annotations

from typing import Any

import pytest


async def _shift(service: Any, statement: str, seconds: float) -> None:
    await service.sql(statement.replace("SHIFT", f"interval '{seconds} seconds'"))


async def _lease_passed(service: Any, seconds: float) -> None:
    await _shift(service, "UPDATE attempts SET lease_expires_at = now() - SHIFT", seconds)


async def test_a_lost_worker_is_replaced(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    await _lease_passed(lone_service, 14)
    await worker.reconcile()
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "running"
    await _lease_passed(lone_service, 16)
    await worker.reconcile()
    job = (await user.get(f"/jobs/{running_job}")).json()
    assert (job["status"], job["restarts"]) == ("queued", 1)
    assert job["attempts"][0]["reason"] == "worker_lost"
    assert (await worker.post("heartbeat")).status_code == 409
    await lone_service.advance(5)
    assert (await worker.take(running_job))["attempt"] == 2


async def test_one_job_that_cannot_be_judged_holds_up_no_other(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """Whichever of them is looked at first."""
    await worker.register(cpu_slots=3)
    bad, good, worse = [await submit(user) for _ in range(3)]
    for job_id in (bad, good, worse):
        await worker.take(job_id)
    await worker.reconcile()
    await lone_service.sql(
        "UPDATE jobs SET spec = '{}' WHERE id IN (:bad, :worse)", bad=bad, worse=worse
    )
    await _lease_passed(lone_service, 16)
    await worker.reconcile()
    rows = await lone_service.sql("SELECT id, status FROM jobs")
    status = {row.id: row.status for row in rows}
    assert status == {bad: "starting", good: "queued", worse: "starting"}


async def test_a_node_that_freezes_between_claim_and_first_step_is_replaced(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """The job is starting, and nothing of it was heard but the claim: it has a lease all the same,
    and its silence is told."""
    job_id = await submit(user)
    await worker.reconcile()
    await worker.take(job_id)
    assert (await user.get(f"/jobs/{job_id}")).json()["status"] == "starting"
    await lone_service.advance(31)
    await worker.reconcile()
    events = (await user.get(f"/jobs/{job_id}/events")).json()["items"]
    assert [event["kind"] for event in events].count("node_unreachable") == 1
    lease = (await user.get(f"/jobs/{job_id}")).json()["spec"]["limits"]["lease_ttl_seconds"]
    await lone_service.advance(lease - 31 + 5)
    await worker.reconcile()
    assert (await user.get(f"/jobs/{job_id}")).json()["status"] == "starting"
    await lone_service.advance(15)
    await worker.reconcile()
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert (job["status"], job["restarts"]) == ("queued", 1)
    assert job["attempts"][0]["reason"] == "worker_lost"
    await worker.register("node-b")
    await lone_service.advance(5)
    await worker.take(job_id)


async def test_without_restarts_a_lost_worker_fails_the_job(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user, limits={"max_restarts": 0})
    await worker.take(job_id)
    await _lease_passed(lone_service, 16)
    await worker.reconcile()
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert (job["status"], job["reason"]) == ("failed", "worker_lost")
    assert "lease" in job["detail"]


async def test_a_heartbeat_renews(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    await _lease_passed(lone_service, 16)
    assert (await worker.post("heartbeat")).json()["lease_seconds"] == 900
    await worker.reconcile()
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "running"


@pytest.mark.parametrize("name", ["api", "controller"])
async def test_downtime_is_added_to_every_lease(
    worker: Any, user: Any, running_job: str, lone_service: Any, name: str
) -> None:
    """An hour without the API, or without the controller: a lease of 15 minutes survives."""
    await worker.reconcile()
    await _lease_passed(lone_service, 3600 - 900)
    await lone_service.sql(
        "UPDATE service_clocks SET alive_at = now() - interval '1 hour', "
        "counted_until = now() - interval '1 hour' WHERE name = :name",
        name=name,
    )
    await worker.reconcile(api_alive=name != "api")
    await worker.reconcile()
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "running"
    [row] = await lone_service.sql(
        "SELECT extract(epoch FROM lease_expires_at - now()) AS left FROM attempts"
    )
    assert 880 < float(row.left) < 920, "the outage is counted, and counted once"


async def test_an_outage_is_counted_once_however_many_ticks_see_it(
    worker: Any, running_job: str, lone_service: Any
) -> None:
    await worker.reconcile()
    await lone_service.sql(
        "UPDATE service_clocks SET alive_at = now() - interval '100 seconds', "
        "counted_until = now() - interval '200 seconds' WHERE name = 'api'"
    )

    async def left() -> float:
        [row] = await lone_service.sql(
            "SELECT extract(epoch FROM lease_expires_at - now()) AS left FROM attempts"
        )
        return float(row.left)

    before = await left()
    for _ in range(5):
        await worker.reconcile(api_alive=False)
    assert 95 < await left() - before < 115


async def test_silence_is_told_and_taken_back(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    old = "now() - interval '31 seconds'"
    await lone_service.sql(f"UPDATE attempts SET last_heartbeat_at = {old}")
    await lone_service.sql(f"UPDATE nodes SET last_heartbeat_at = {old}")
    await worker.reconcile()
    kinds = [e["kind"] for e in (await user.get(f"/jobs/{running_job}/events")).json()["items"]]
    assert "node_unreachable" not in kinds, "the API is up for less than the heartbeat's ttl"
    await lone_service.sql("UPDATE service_clocks SET up_since = now() - interval '1 hour'")
    await worker.reconcile(api_alive=False)
    await worker.reconcile()
    job = (await user.get(f"/jobs/{running_job}")).json()
    assert job["status"] == "running"
    assert job["attempts"][0]["unreachable_since"]
    assert (await user.get("/nodes")).json()["items"][0]["unreachable_since"]
    await worker.post("heartbeat")
    await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    kinds = [e["kind"] for e in (await user.get(f"/jobs/{running_job}/events")).json()["items"]]
    assert kinds.count("node_unreachable") == 1
    assert kinds[-1] == "node_reachable"
    assert (await user.get("/nodes")).json()["items"][0]["unreachable_since"] is None


async def test_a_cancel_past_its_deadline_is_forced(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """A supervisor that lives but does not end its trainer loses its lease."""
    job_id = await submit(user, limits={"cancel_deadline_seconds": 60})
    await worker.take(job_id)
    await user.post(f"/jobs/{job_id}/cancel")
    answer = (await worker.post("heartbeat")).json()
    assert answer["wanted"] == "cancel"
    assert 80 <= answer["lease_seconds"] <= 90
    await lone_service.advance(200)
    assert (await worker.post("heartbeat")).json()["lease_seconds"] == 1
    await worker.reconcile()
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert (job["status"], job["reason"]) == ("cancelled", "cancelled_by_user")
    assert "presumed" in job["detail"]
    assert (await worker.finish("stopped", "cancelled_by_user")).status_code == 409


@pytest.mark.parametrize("stop", ["cancel", "pause"])
@pytest.mark.parametrize("told", ["never", "by a late heartbeat", "in order"])
async def test_a_lease_is_over_only_when_its_holder_knows_it(
    worker: Any, user: Any, submit: Any, lone_service: Any, stop: str, told: str
) -> None:
    """A stop shortens the lease. Where that answer is lost, and the node is cut off then, its
    trainer runs until the lease before is over: the place is not another's sooner."""
    job_id = await submit(user, limits={"cancel_deadline_seconds": 60})
    await worker.take(job_id)
    held = worker.attempt["lease_number"]
    await worker.post("heartbeat")
    await user.post(f"/jobs/{job_id}/{stop}")
    answer = (await worker.post("heartbeat", lost=True)).json()
    assert 80 <= answer["lease_seconds"] <= 90
    if told == "by a late heartbeat":
        # Of before the stop, and on its way until now: it says nothing of the lease held since.
        await worker.post("heartbeat", lost=True, lease_number=held)
    if told == "in order":
        await worker.post("heartbeat")
        await worker.post("heartbeat", lost=True)
    await lone_service.advance(150)
    await worker.reconcile()
    over = (await user.get(f"/jobs/{job_id}")).json()["attempts"][0]["status"] == "ended"
    assert over == (told == "in order")
    await lone_service.advance(900 + 16 - 150)
    await worker.reconcile()
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert job["status"] == {"cancel": "cancelled", "pause": "paused"}[stop]


async def test_a_cancel_on_a_lost_node_waits_for_the_lease(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    await user.post(f"/jobs/{running_job}/cancel")
    await lone_service.sql(
        "UPDATE jobs SET stop_deadline_at = stop_deadline_at - interval '200 seconds'"
    )
    await worker.reconcile()
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "cancelling"
    await _lease_passed(lone_service, 16)
    await worker.reconcile()
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "cancelled"


async def test_a_pause_on_a_lost_node(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    await user.post(f"/jobs/{running_job}/pause")
    await _lease_passed(lone_service, 16)
    await worker.reconcile()
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "paused"


async def test_a_booted_machine_runs_nothing_any_more(
    worker: Any, user: Any, running_job: str
) -> None:
    await worker.register()
    await worker.reconcile()
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "running"
    await worker.register(boot_id="boot-2")
    await worker.reconcile()
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "queued"


@pytest.mark.parametrize(
    ("status", "then"),
    [
        ("starting", "queued"),
        ("running", "queued"),
        ("pausing", "paused"),
        ("cancelling", "cancelled"),
    ],
)
async def test_a_state_that_nobody_owns_is_picked_up(
    worker: Any, user: Any, submit: Any, lone_service: Any, status: str, then: str
) -> None:
    job_id = await submit(user)
    await lone_service.sql("UPDATE jobs SET status = :status", status=status)
    await worker.reconcile()
    assert (await user.get(f"/jobs/{job_id}")).json()["status"] == then
