"""A job's own limits, by a database clock that tests move: queue, run time, stalls, deadlines."""

from __future__ import annotations

from typing import Any

import pytest


async def _job(user: Any, job_id: str) -> dict[str, Any]:
    return dict((await user.get(f"/jobs/{job_id}")).json())


async def _kinds(user: Any, job_id: str) -> list[str]:
    return [e["kind"] for e in (await user.get(f"/jobs/{job_id}/events")).json()["items"]]


async def test_a_job_that_waits_too_long_fails(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    first = await submit(user)
    await worker.take(first)
    job_id = await submit(user, limits={"max_queue_time_seconds": 60})
    await lone_service.advance(30)
    await worker.reconcile()
    assert (await _job(user, job_id))["status"] == "queued"
    await lone_service.advance(31)
    await worker.reconcile()
    job = await _job(user, job_id)
    assert (job["status"], job["reason"]) == ("failed", "queue_time_exceeded")
    assert "60 s" in job["detail"]
    assert (await _kinds(user, job_id))[-1] == "status"


async def test_our_downtime_is_no_wait(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user, limits={"max_queue_time_seconds": 60})
    await worker.reconcile()
    await lone_service.advance(3600, service_away=True)
    await worker.reconcile()
    assert (await _job(user, job_id))["status"] == "queued"


async def test_each_wait_counts_anew_and_a_restarts_pause_does_not(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    limits = {"max_queue_time_seconds": 60, "restart_backoff_seconds": 100}
    job_id = await submit(user, limits=limits)
    await lone_service.advance(50)
    await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    await worker.take(job_id)
    await worker.finish("failed", "trainer_crashed", resumable=True)
    await lone_service.advance(150)
    await worker.reconcile()
    assert (await _job(user, job_id))["status"] == "queued"
    await lone_service.advance(15)
    await worker.reconcile()
    assert (await _job(user, job_id))["reason"] == "queue_time_exceeded"


@pytest.mark.parametrize("ends", ["gently", "by force", "as a success", "failed"])
async def test_a_job_that_runs_too_long_is_stopped(
    worker: Any, user: Any, submit: Any, lone_service: Any, ends: str
) -> None:
    limits = {"max_run_time_seconds": 600, "cancel_deadline_seconds": 30}
    job_id = await submit(user, limits=limits)
    await worker.take(job_id)
    await lone_service.advance(400)
    await worker.post("heartbeat", step=5)
    await worker.finish("stopped", "stopped_by_request", step=5)
    await lone_service.advance(5000)
    await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    await worker.take(job_id)
    await lone_service.advance(100)
    await worker.post("heartbeat", step=6)
    await worker.reconcile()
    assert (await _job(user, job_id))["status"] == "starting", "waits do not count"
    await lone_service.advance(101)
    await worker.reconcile()
    job = await _job(user, job_id)
    assert (job["status"], job["reason"]) == ("cancelling", "wall_time_exceeded")
    assert job["stop_deadline_at"]
    answer = (await worker.post("heartbeat", step=6)).json()
    assert (answer["wanted"], answer["wanted_reason"]) == ("cancel", "wall_time_exceeded")
    assert 10 < answer["stop_within_seconds"] <= 30
    assert answer["lease_seconds"] <= 60
    assert (await user.post(f"/jobs/{job_id}/cancel")).json()["status"] == "cancelling"
    if ends == "gently":
        await worker.finish("stopped", "cancelled_by_user", step=6, detail="cancelled")
    elif ends == "failed":
        await worker.finish("failed", "trainer_crashed", resumable=True)
    elif ends == "as a success":
        await worker.finish("succeeded", "completed", step=50)
    else:
        # It lives, and holds the short lease that it was given; its trainer does not end.
        await worker.post("heartbeat", step=6)
        await lone_service.advance(100)
        await worker.reconcile()
    job = await _job(user, job_id)
    if ends == "as a success":
        assert (job["status"], job["reason"]) == ("succeeded", "completed")
        return
    assert (job["status"], job["reason"]) == ("failed", "wall_time_exceeded")
    assert "600 s" in job["detail"]
    if ends == "gently":
        assert job["attempts"][-1]["reason"] == "wall_time_exceeded"
    if ends == "by force":
        assert "presumed" in job["detail"]


async def _stall(worker: Any, service: Any, *, heard: bool = True) -> None:
    """101 seconds without a step; the supervisor is heard at their end, or is not."""
    await worker.post("heartbeat", phase="training", step=3)
    await service.advance(101)
    if heard:
        await worker.post("heartbeat", phase="training", step=3)
    await worker.reconcile()


async def test_a_stall_is_told_once_and_ends_with_the_next_step(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user, limits={"stall_timeout_seconds": 100})
    await worker.take(job_id)
    await _stall(worker, lone_service)
    await worker.reconcile()
    job = await _job(user, job_id)
    assert job["status"] == "starting"
    assert job["attempts"][0]["stalled_since"]
    events = (await user.get(f"/jobs/{job_id}/events")).json()["items"]
    [event] = [e for e in events if e["kind"] == "stalled"]
    assert event["data"].items() >= {"step": 3, "phase": "training", "on_stall": "report"}.items()
    await worker.post("heartbeat", phase="training", step=4)
    assert (await _kinds(user, job_id))[-1] == "progressed"
    assert (await _job(user, job_id))["attempts"][0]["stalled_since"] is None
    await _stall(worker, lone_service)
    assert (await _kinds(user, job_id)).count("stalled") == 2


async def test_a_silent_node_is_no_stall(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user, limits={"stall_timeout_seconds": 100, "on_stall": "fail"})
    await worker.take(job_id)
    await _stall(worker, lone_service, heard=False)
    assert "stalled" not in await _kinds(user, job_id)
    # Heard again, it has gone on meanwhile: by its heartbeat, or by what it had kept.
    await worker.post("heartbeat", phase="training", step=9)
    await worker.reconcile()
    assert "stalled" not in await _kinds(user, job_id)


async def test_a_stall_can_fail_the_job(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user, limits={"stall_timeout_seconds": 100, "on_stall": "fail"})
    await worker.take(job_id)
    await _stall(worker, lone_service)
    job = await _job(user, job_id)
    assert (job["status"], job["reason"]) == ("cancelling", "stalled")
    await worker.finish("stopped", "cancelled_by_user", step=3)
    job = await _job(user, job_id)
    assert (job["status"], job["reason"]) == ("failed", "stalled")
    assert "100 s" in job["detail"]


@pytest.mark.parametrize("by_force", [False, True])
async def test_a_stall_can_restart_the_job_while_restarts_are_left(
    worker: Any, user: Any, submit: Any, lone_service: Any, by_force: bool
) -> None:
    limits = {"stall_timeout_seconds": 100, "on_stall": "restart", "max_restarts": 1}
    job_id = await submit(user, limits=limits | {"cancel_deadline_seconds": 30})
    await worker.take(job_id)
    await _stall(worker, lone_service)
    job = await _job(user, job_id)
    assert (job["status"], job["reason"]) == ("pausing", "stalled")
    answer = (await worker.post("heartbeat")).json()
    assert (answer["wanted"], answer["wanted_reason"]) == ("pause", "stalled")
    if by_force:
        # It lives, and holds the short lease that it was given; its trainer does not end.
        await worker.post("heartbeat")
        await lone_service.advance(100)
        await worker.reconcile()
    else:
        await worker.finish("stopped", "stopped_by_request", step=3)
    job = await _job(user, job_id)
    assert (job["status"], job["reason"], job["restarts"]) == ("queued", None, 1)
    await lone_service.advance(10)
    await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    await worker.take(job_id)
    await _stall(worker, lone_service)
    job = await _job(user, job_id)
    assert (job["status"], job["reason"]) == ("cancelling", "stalled")
    await worker.finish("stopped", "cancelled_by_user")
    job = await _job(user, job_id)
    assert (job["status"], job["reason"]) == ("failed", "stalled")
    assert "1 restart(s) are used up" in job["detail"]


async def test_a_user_may_keep_paused_what_the_service_was_about_to_restart(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user, limits={"stall_timeout_seconds": 100, "on_stall": "restart"})
    await worker.take(job_id)
    await _stall(worker, lone_service)
    job = (await user.post(f"/jobs/{job_id}/pause")).json()
    assert (job["status"], job["reason"]) == ("pausing", None)
    assert (await _kinds(user, job_id))[-1] == "pause"
    await worker.finish("stopped", "stopped_by_request", step=3)
    job = await _job(user, job_id)
    assert (job["status"], job["restarts"], job["reason"]) == ("paused", 0, None)


async def test_a_pause_past_its_deadline_is_forced(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """A supervisor that lives but does not end its trainer loses its lease and its slot."""
    job_id = await submit(user, limits={"cancel_deadline_seconds": 60})
    await worker.take(job_id)
    job = (await user.post(f"/jobs/{job_id}/pause")).json()
    assert job["stop_deadline_at"]
    answer = (await worker.post("heartbeat")).json()
    assert (answer["wanted"], answer["wanted_reason"]) == ("pause", None)
    assert 80 <= answer["lease_seconds"] <= 90
    await lone_service.advance(200)
    assert (await worker.post("heartbeat")).json()["stop_within_seconds"] == 0
    await worker.reconcile()
    job = await _job(user, job_id)
    assert (job["status"], job["stop_deadline_at"]) == ("paused", None)
    assert (await user.get("/nodes")).json()["items"][0]["cpu_slots_used"] == 0
    assert (await worker.finish("stopped", "stopped_by_request")).status_code == 409


async def test_a_cancel_of_a_pausing_job_has_its_own_deadline(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user, limits={"cancel_deadline_seconds": 60})
    await worker.take(job_id)
    await user.post(f"/jobs/{job_id}/pause")
    await lone_service.advance(50)
    await user.post(f"/jobs/{job_id}/cancel")
    answer = (await worker.post("heartbeat")).json()
    assert (answer["wanted"], answer["wanted_reason"]) == ("cancel", None)
    assert 55 < answer["stop_within_seconds"] <= 60
    await worker.finish("stopped", "cancelled_by_user")
    assert (await _job(user, job_id))["status"] == "cancelled"
