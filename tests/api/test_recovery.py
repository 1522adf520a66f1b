"""What is tried again and what is not, how fast, from which checkpoint, and whose fault counts."""

from __future__ import annotations

from typing import Any

import pytest


async def _job(user: Any, job_id: str) -> dict[str, Any]:
    return dict((await user.get(f"/jobs/{job_id}")).json())


async def _fail(worker: Any, job_id: str, reason: str, **more: Any) -> str:
    await worker.take(job_id)
    answer = await worker.finish("failed", reason, **more)
    return str(answer.json()["job_status"])


@pytest.fixture
def at_once() -> dict[str, Any]:
    """Limits of a job that is started again without a pause."""
    return {"restart_backoff_seconds": 0}


LASTING = ["spec_invalid", "data_invalid", "model_unavailable", "engine_unsupported", "diverged"]


@pytest.mark.parametrize("reason", LASTING)
async def test_what_must_come_back_is_not_tried_again(
    worker: Any, user: Any, submit: Any, reason: str
) -> None:
    """Whatever its supervisor thinks."""
    job_id = await submit(user)
    assert await _fail(worker, job_id, reason, resumable=True, detail="why") == "failed"
    job = await _job(user, job_id)
    assert (job["reason"], job["detail"], job["restarts"]) == (reason, "why", 0)


async def test_out_of_memory_is_final_the_second_time_at_a_step(
    worker: Any, user: Any, submit: Any, at_once: Any
) -> None:
    job_id = await submit(user, limits=at_once)
    assert await _fail(worker, job_id, "out_of_memory", step=7) == "queued"
    assert await _fail(worker, job_id, "out_of_memory", step=9) == "queued"
    assert await _fail(worker, job_id, "out_of_memory", step=7) == "failed"
    job = await _job(user, job_id)
    assert (job["reason"], job["restarts"]) == ("out_of_memory", 2)


async def test_out_of_memory_before_the_first_step_counts_as_one_step(
    worker: Any, user: Any, submit: Any, at_once: Any
) -> None:
    job_id = await submit(user, limits=at_once)
    assert await _fail(worker, job_id, "out_of_memory") == "queued"
    assert await _fail(worker, job_id, "out_of_memory") == "failed"


async def test_restarts_are_paced_and_the_pause_is_told(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user, limits={"restart_backoff_seconds": 40})
    pauses = []
    for _ in range(3):
        assert await _fail(worker, job_id, "trainer_crashed", resumable=True) == "queued"
        [row] = await lone_service.sql(
            "SELECT extract(epoch FROM next_attempt_at - now()) AS pause FROM jobs"
        )
        pauses.append(round(float(row.pause) / 10) * 10)
        assert await worker.schedule() == 0, "the node is free, the job is not yet due"
        job = await _job(user, job_id)
        assert job["waiting_for"].startswith(f"the pause before restart {job['restarts']} of 3: ")
        assert job["next_attempt_at"]
        await lone_service.advance(float(row.pause) + 1)
        await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    assert pauses == [40, 80, 160]
    assert (await _job(user, job_id))["restarts"] == 3
    assert await _fail(worker, job_id, "trainer_crashed", resumable=True) == "failed"
    assert (await _job(user, job_id))["detail"] == "The job's 3 restart(s) are used up."


async def test_the_pause_has_a_longest(worker: Any, user: Any, submit: Any) -> None:
    from octrain_api.jobs.limits import LONGEST_BACKOFF, backoff
    from octrain_api.models import Job

    job = Job(spec={"limits": {"restart_backoff_seconds": 60}})
    assert [backoff(job, n) for n in (1, 2, 3)] == [60, 120, 240]
    assert backoff(job, 100) == LONGEST_BACKOFF == 3600
    assert backoff(Job(spec={"limits": {"restart_backoff_seconds": 0}}), 5) == 0


async def test_cancel_during_recovery(worker: Any, user: Any, submit: Any) -> None:
    job_id = await submit(user)
    await _fail(worker, job_id, "trainer_crashed", resumable=True)
    job = (await user.post(f"/jobs/{job_id}/cancel")).json()
    assert (job["status"], job["next_attempt_at"]) == ("cancelled", None)


async def test_a_loss_by_our_own_outage_costs_no_restart(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """The API was away for longer than the lease; the supervisor stopped its trainer, and says so
    once it is back: with heartbeats first, with heartbeats and what it trained in the outage, or
    with nothing before the end."""
    for heard_first, late_steps in ((True, False), (True, True), (False, False)):
        job_id = await submit(user, limits={"lease_ttl_seconds": 60})
        await worker.take(job_id)
        await worker.post("heartbeat", step=5)
        await worker.reconcile()
        await lone_service.advance(3600, service_away=True)
        await worker.reconcile()
        await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
        if heard_first:
            assert (await worker.post("heartbeat", step=6)).status_code == 200
            await lone_service.advance(20)
            if late_steps:
                record = {"type": "metrics", "step": 6, "values": {"train/loss": 1.0}}
                assert (await worker.telemetry(1, record)).status_code == 200
            for _ in range(3):  # what it has left takes it longer than its lease to store
                assert (await worker.post("heartbeat", step=6)).status_code == 200
                await lone_service.advance(20)
                await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
        answer = await worker.finish("failed", "worker_lost", step=6, resumable=True)
        assert answer.json() == {"job_status": "queued"}
        job = await _job(user, job_id)
        assert (job["restarts"], job["next_attempt_at"]) == (0, None)
        events = (await user.get(f"/jobs/{job_id}/events")).json()["items"]
        assert "while the API was away" in events[-1]["message"]
        await user.post(f"/jobs/{job_id}/cancel")


async def test_a_supervisor_may_be_back_before_the_apis_own_note(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """The database was away: the first to be answered is a supervisor, not the API's own beat."""
    for heard_first in (True, False):
        job_id = await submit(user, limits={"lease_ttl_seconds": 60})
        await worker.take(job_id)
        await worker.post("heartbeat", step=5)
        await worker.reconcile()
        await lone_service.advance(50, service_away=True)
        if heard_first:
            assert (await worker.post("heartbeat", step=6)).status_code == 200
        await worker.reconcile()
        await worker.finish("failed", "worker_lost", step=6, resumable=True)
        job = await _job(user, job_id)
        assert (job["status"], job["restarts"]) == ("queued", 0), heard_first
        await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
        await user.post(f"/jobs/{job_id}/cancel")


@pytest.mark.parametrize("heard_first", [True, False])
async def test_a_loss_by_the_network_costs_one(
    worker: Any, user: Any, submit: Any, lone_service: Any, heard_first: bool
) -> None:
    """The API was there all the time; and an outage that the training survived is forgotten."""
    job_id = await submit(user, limits={"lease_ttl_seconds": 60})
    await worker.take(job_id)
    await worker.reconcile()
    await lone_service.advance(3600, service_away=True)
    await worker.reconcile()
    await worker.post("heartbeat", step=6)
    await lone_service.advance(10)
    await worker.post("heartbeat", step=7)
    await lone_service.advance(40)
    if heard_first:
        await worker.post("heartbeat", step=7)
    await worker.finish("failed", "worker_lost", step=7, resumable=True)
    assert (await _job(user, job_id))["restarts"] == 1


async def _checkpoint(worker: Any, step: int) -> str:
    url = worker.service.settings.storage.artifact_url
    answer = await worker.post(
        "artifacts",
        kind="checkpoint",
        name=f"step-{step:08d}",
        step=step,
        url=f"{url}/{worker.attempt['artifact_prefix']}/checkpoints/step-{step:08d}",
        files=[{"path": "x", "size": 1, "sha256": "0" * 64}],
    )
    return str(answer.json()["artifact_id"])


async def test_a_torn_checkpoint_is_passed_over_for_good(
    worker: Any, user: Any, submit: Any, at_once: Any
) -> None:
    job_id = await submit(user, limits=at_once)
    await worker.take(job_id)
    ids = {step: await _checkpoint(worker, step) for step in (10, 20, 30)}
    await worker.finish("failed", "trainer_crashed", step=31, resumable=True)
    claim = await worker.take(job_id)
    assert [c["step"] for c in claim["resume_candidates"]] == [30, 20, 10]
    assert [c["artifact_id"] for c in claim["resume_candidates"]] == [ids[30], ids[20], ids[10]]
    assert claim["resume_from"] == claim["resume_candidates"][0]
    torn = {"type": "event", "kind": "checkpoint_torn", "message": "torn", "data": {}}
    answer = await worker.telemetry(
        1,
        torn | {"data": {"step": 30, "artifact_id": ids[30]}},
        torn | {"data": {"artifact_id": "art_of_somebody_else"}},
        torn | {"data": {"artifact_id": ["no", "id"]}},
    )
    assert answer.json()["acknowledged_seq"] == 3
    events = (await user.get(f"/jobs/{job_id}/events")).json()["items"]
    assert [e["kind"] for e in events[-3:]] == ["checkpoint_torn"] * 3
    await _checkpoint(worker, 25)
    await worker.finish("failed", "trainer_crashed", step=26, resumable=True)
    claim = await worker.take(job_id)
    assert [c["step"] for c in claim["resume_candidates"]] == [25, 20, 10]


async def test_a_torn_checkpoint_of_a_private_node_binds_no_longer(
    worker: Any, user: Any, submit: Any, lone_service: Any, at_once: Any
) -> None:
    await worker.register("node-a", private_roots=True)
    job_id = await submit(user, limits=at_once)
    await worker.take(job_id)
    only = await _checkpoint(worker, 10)
    [row] = await lone_service.sql("SELECT need FROM jobs")
    assert row.need == f"auto:1:emulated@{worker.node_id}"
    await worker.telemetry(
        1, {"type": "event", "kind": "checkpoint_torn", "data": {"artifact_id": only}}
    )
    [row] = await lone_service.sql("SELECT need FROM jobs")
    assert row.need == "auto:1:emulated"


async def test_repeated_steps_are_the_newer_attempts_in_every_view(
    worker: Any, user: Any, submit: Any, at_once: Any
) -> None:
    def records(first: int, last: int, value: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for step in range(first, last + 1):
            values = {"train/loss": value + step}
            found.append({"type": "metrics", "time": 1.0, "step": step, "values": values})
            found.append({"type": "progress", "time": 1.0, "step": step, "total_steps": 50})
        return found

    job_id = await submit(user, limits=at_once)
    await worker.take(job_id)
    await worker.telemetry(1, *records(1, 6, 100.0))
    assert (await _job(user, job_id))["latest_metrics"]["train/loss"] == 106.0
    await worker.finish("failed", "trainer_crashed", step=6, resumable=True)
    await worker.take(job_id)
    await worker.telemetry(1, *records(4, 5, 200.0))
    job = await _job(user, job_id)
    assert job["latest_metrics"]["train/loss"] == 205.0
    assert job["progress"]["step"] == 5
    assert [(a["number"], a["step"]) for a in job["attempts"]] == [(1, 6), (2, 5)]
    series = (await user.get(f"/jobs/{job_id}/metrics?keys=train/loss")).json()["series"]
    assert [(s["attempt"], s["points"]) for s in series] == [
        (1, [[1, 101.0], [2, 102.0], [3, 103.0]]),
        (2, [[4, 204.0], [5, 205.0]]),
    ]
