"""Claims, fencing, exactly-once telemetry and the ends of attempts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest


def _metrics(step: int, **values: Any) -> dict[str, Any]:
    return {"type": "metrics", "time": 1.0, "step": step, "values": values}


async def _series(user: Any, job_id: str) -> list[dict[str, Any]]:
    return list((await user.get(f"/jobs/{job_id}/metrics")).json()["series"])


async def test_a_job_runs_to_its_end(worker: Any, user: Any, submit: Any) -> None:
    job_id = await submit(user)
    claim = await worker.take(job_id)
    assert claim["job_id"] == job_id
    assert claim["attempt"] == 1
    assert claim["wanted"] == "run"
    assert claim["lease_seconds"] == 900
    assert claim["artifact_prefix"] == f"jobs/{job_id}/attempts/1"
    assert claim["resume_from"] is None
    assert claim["device"] == "cpu"
    assert claim["spec"]["training"]["steps"] == 50
    assert (await user.get(f"/jobs/{job_id}")).json()["status"] == "starting"

    answer = await worker.post("heartbeat", phase="training", step=0)
    assert answer.json() == {
        "wanted": "run",
        "wanted_reason": None,
        "stop_within_seconds": None,
        "lease_seconds": 900,
        "lease_number": 2,
    }
    progress = {
        "type": "progress",
        "step": 3,
        "total_steps": 50,
        "tokens": 768,
        "eta_seconds": 4.5,
    }
    await worker.telemetry(1, _metrics(1, **{"train/loss": "NaN"}), progress)
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert job["status"] == "running"
    assert job["progress"] == {"step": 3, "total_steps": 50, "tokens": 768, "eta_seconds": 4.5}
    assert job["latest_metrics"] == {"train/loss": "NaN"}
    assert job["started_at"]
    assert [a["status"] for a in job["attempts"]] == ["running"]
    assert job["attempts"][0]["node"] == "node-a"

    answer = await worker.finish("succeeded", "completed", step=50, exit_code=0)
    assert answer.json() == {"job_status": "succeeded"}
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert (job["status"], job["reason"], job["is_final"]) == ("succeeded", "completed", True)
    assert job["ended_at"]
    assert job["attempts"][0]["outcome"] == "succeeded"
    events = (await user.get(f"/jobs/{job_id}/events")).json()["items"]
    moves = [(e["data"]["from"], e["data"]["to"]) for e in events if e["kind"] == "status"]
    assert moves == [
        (None, "queued"),
        ("queued", "starting"),
        ("starting", "running"),
        ("running", "succeeded"),
    ]


async def test_only_one_supervisor_claims(worker: Any, user: Any, submit: Any) -> None:
    job_id = await submit(user)
    await worker.schedule()
    attempt = await worker.placed(job_id)
    answers = await asyncio.gather(
        *(worker.claim(attempt, f"supervisor-{number}") for number in range(5))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409, 409]
    refused = next(answer for answer in answers if answer.status_code == 409)
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["type"] == "/problems/stale-attempt"
    winner = next(n for n, answer in enumerate(answers) if answer.status_code == 200)
    again = await worker.claim(attempt, f"supervisor-{winner}")
    # The same attempt, and the next lease of it.
    assert again.json() == answers[winner].json() | {"lease_number": 2}


async def test_a_claim_that_is_repeated_has_the_lease_that_it_says(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    """The first answer was lost, and the supervisor counts from the second."""
    job_id = await submit(user)
    await worker.take(job_id)
    await lone_service.advance(800)
    again = await worker.claim(worker.attempt["attempt_id"])
    assert (again.status_code, again.json()["lease_seconds"]) == (200, 900)
    [row] = await lone_service.sql(
        "SELECT extract(epoch FROM lease_expires_at - now()) AS left FROM attempts"
    )
    assert 800 < row.left <= 900


async def test_another_nodes_attempt_cannot_be_claimed(worker: Any, user: Any, submit: Any) -> None:
    job_id = await submit(user)
    await worker.schedule()
    attempt = await worker.placed(job_id)
    await worker.register("node-b")
    assert (await worker.claim(attempt)).status_code == 404
    # Nor by the right key, in the name of another node.
    await worker.speak_for("node-a")
    assert (await worker.claim(attempt)).status_code == 409


async def test_another_owners_key_sees_no_attempt(
    worker: Any, lone_service: Any, running_job: str
) -> None:
    stranger = lone_service.client(await lone_service.key("stranger", "node"))
    path = f"/attempts/{worker.attempt['attempt_id']}"
    token = {"fencing_token": worker.attempt["fencing_token"]}
    assert (await stranger.post(f"{path}/heartbeat", json=token)).status_code == 404
    assert (await stranger.post(f"/nodes/{worker.node_id}/heartbeat", json={})).status_code == 404
    taken = await stranger.post(
        "/nodes/register",
        json={
            "name": "node-a",
            "boot_id": "x",
            "hostname": "x",
            "version": "x",
            "device_kinds": ["cpu"],
            "cpu_slots": 1,
        },
    )
    assert taken.status_code == 403


_WRITES: list[tuple[str, dict[str, Any]]] = [
    ("heartbeat", {"step": 7}),
    ("telemetry", {"first_seq": 3, "records": [_metrics(9, **{"train/loss": 1.0})]}),
    ("finish", {"outcome": "succeeded", "reason": "completed"}),
    (
        "artifacts",
        {
            "kind": "report",
            "name": "r",
            "url": "file:///x",
            "files": [{"path": "r", "size": 1, "sha256": "0" * 64}],
        },
    ),
]


@pytest.mark.parametrize(("action", "body"), _WRITES)
async def test_a_stale_token_writes_nothing(
    worker: Any, user: Any, running_job: str, action: str, body: dict[str, Any]
) -> None:
    before = (await user.get(f"/jobs/{running_job}")).json()
    stale = worker.attempt["fencing_token"] - 1
    answer = await worker.post(action, **body, fencing_token=stale)
    assert answer.status_code == 409
    assert answer.json()["type"] == "/problems/stale-attempt"
    assert (await user.get(f"/jobs/{running_job}")).json() == before


@pytest.mark.parametrize(("action", "body"), _WRITES)
async def test_an_ended_attempt_takes_nothing(
    worker: Any, user: Any, running_job: str, action: str, body: dict[str, Any]
) -> None:
    await worker.finish("failed", "trainer_crashed", detail="signal 11")
    before = (await user.get(f"/jobs/{running_job}")).json()
    assert before["status"] == "failed"
    assert (await worker.post(action, **body)).status_code == 409
    assert (await user.get(f"/jobs/{running_job}")).json() == before


async def test_every_record_is_stored_once(worker: Any, user: Any, running_job: str) -> None:
    """Duplicate and concurrent batches, as retries make them, in any order."""
    records = [_metrics(step, loss=float(step)) for step in range(3, 103)]
    batches = [(first, records[first - 3 : first + 7]) for first in range(3, 103, 10)]
    sent = 2
    while sent < 102:
        answers = await asyncio.gather(
            *(worker.telemetry(first, *batch) for first, batch in batches for _ in range(2))
        )
        for answer in answers:
            assert answer.status_code in (200, 409)
            if answer.status_code == 409:
                assert answer.json()["type"] == "/problems/sequence-gap"
                assert answer.json()["expected_seq"] <= 102
            else:
                sent = max(sent, answer.json()["acknowledged_seq"])
    series = {s["name"]: s["points"] for s in await _series(user, running_job)}
    assert series["loss"] == [[step, float(step)] for step in range(3, 103)]


async def test_overlapping_batches_keep_only_what_is_new(
    worker: Any, user: Any, running_job: str
) -> None:
    first = [_metrics(2, a=1.0), _metrics(3, a=2.0)]
    assert (await worker.telemetry(3, *first)).json()["acknowledged_seq"] == 4
    more = [*first, _metrics(4, a=3.0)]
    assert (await worker.telemetry(3, *more)).json()["acknowledged_seq"] == 5
    assert (await worker.telemetry(1, *more)).json()["acknowledged_seq"] == 5
    gap = await worker.telemetry(9, _metrics(9, a=9.0))
    assert (gap.status_code, gap.json()["expected_seq"]) == (409, 6)
    series = {s["name"]: s["points"] for s in await _series(user, running_job)}
    assert series["a"] == [[2, 1.0], [3, 2.0], [4, 3.0]]


async def test_a_bad_record_is_told_and_stops_nothing(
    worker: Any, user: Any, running_job: str
) -> None:
    records = [
        {"type": "metrics", "step": "x", "values": {}},
        {"type": "new_kind"},
        _metrics(5, ok=1.0),
        {"type": "log", "stream": "stderr", "time": 9.5, "text": "nul \x00 half \ud800 end"},
        {"type": "event", "kind": "status", "message": "m", "data": {"x": ["\x00"]}},
    ]
    token = worker.attempt["fencing_token"]
    answer = await worker.http.post(
        f"/attempts/{worker.attempt['attempt_id']}/telemetry",
        content=json.dumps({"fencing_token": token, "first_seq": 3, "records": records}),
        headers={"Content-Type": "application/json"},
    )
    assert answer.json()["acknowledged_seq"] == 7
    events = (await user.get(f"/jobs/{running_job}/events")).json()["items"]
    assert [e["kind"] for e in events][-3:] == [
        "record_refused",
        "record_refused",
        "trainer_status",
    ]
    lines = (await user.get(f"/jobs/{running_job}/logs")).json()["lines"]
    assert [(line["seq"], line["stream"]) for line in lines] == [(1, "stderr")]
    assert lines[0]["text"].startswith("nul \ufffd half \ufffd")
    assert lines[0]["text"].endswith(" end")


async def test_finish_twice_is_answered_twice(worker: Any, user: Any, running_job: str) -> None:
    report = {"detail": "all done", "step": 50, "exit_code": 0}
    for _ in range(2):
        answer = await worker.finish("succeeded", "completed", **report)
        assert (answer.status_code, answer.json()) == (200, {"job_status": "succeeded"})
    assert (await worker.finish("failed", "trainer_crashed")).status_code == 409
    events = (await user.get(f"/jobs/{running_job}/events")).json()["items"]
    assert sum(e["data"].get("to") == "succeeded" for e in events) == 1


async def test_what_cannot_be_stored_is_refused(
    worker: Any, running_job: str, lone_service: Any
) -> None:
    """And the largest numbers that are taken can be, all files of an artifact together."""
    url = f"{lone_service.settings.storage.artifact_url}/jobs/{running_job}/attempts/1/model"

    async def register(count: int, size: int, name: str = "model") -> int:
        files = [{"path": str(n), "size": size, "sha256": "0" * 64} for n in range(count)]
        answer = await worker.post("artifacts", kind="model", name=name, url=url, files=files)
        return int(answer.status_code)

    assert await register(2, 2**46 + 1) == 422
    assert await register(1, 1, name="mo\x00del") == 422
    assert await register(100_000, 2**46) == 200
    for code, status in ((2**31, 422), (-(2**31) - 1, 422), (2**31 - 1, 200)):
        answer = await worker.finish("failed", "trainer_crashed", exit_code=code)
        assert answer.status_code == status, answer.text


async def test_a_released_attempt_costs_no_restart(
    worker: Any, user: Any, running_job: str
) -> None:
    answer = await worker.finish("stopped", "stopped_by_request", step=7, exit_code=10)
    assert answer.json() == {"job_status": "queued"}
    job = (await user.get(f"/jobs/{running_job}")).json()
    assert (job["restarts"], job["is_final"], job["reason"]) == (0, False, None)
    assert (await worker.take(running_job))["attempt"] == 2


async def test_a_released_job_prefers_another_node(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    """The node that let it go may be shutting down, and is heard for a while yet."""
    await worker.finish("stopped", "stopped_by_request", step=7)
    await worker.register("node-b")
    await worker.schedule()
    rows = await lone_service.sql("SELECT node_id FROM attempts WHERE status = 'placed'")
    assert [row.node_id for row in rows] == [worker.node_id]


async def test_a_passing_failure_uses_restarts_until_none_is_left(
    worker: Any, user: Any, submit: Any
) -> None:
    job_id = await submit(user, limits={"max_restarts": 1, "restart_backoff_seconds": 0})
    await worker.take(job_id)
    answer = await worker.finish("failed", "trainer_crashed", resumable=True)
    assert answer.json() == {"job_status": "queued"}
    await worker.take(job_id)
    answer = await worker.finish("failed", "trainer_crashed", detail="again", resumable=True)
    assert answer.json() == {"job_status": "failed"}
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert (job["reason"], job["restarts"]) == ("trainer_crashed", 1)
    assert job["detail"] == "again\nThe job's 1 restart(s) are used up."


async def test_a_lasting_failure_is_final(worker: Any, user: Any, submit: Any) -> None:
    job_id = await submit(user)
    await worker.take(job_id)
    answer = await worker.finish("failed", "model_unavailable", detail="no such model")
    assert answer.json() == {"job_status": "failed"}
    job = (await user.get(f"/jobs/{job_id}")).json()
    assert (job["reason"], job["detail"]) == ("model_unavailable", "no such model")


async def test_cancel_reaches_the_supervisor(worker: Any, user: Any, running_job: str) -> None:
    answer = await user.post(f"/jobs/{running_job}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
    assert (await user.post(f"/jobs/{running_job}/cancel")).json()["status"] == "cancelling"
    assert (await worker.post("heartbeat")).json()["wanted"] == "cancel"
    answer = await worker.finish("stopped", "cancelled_by_user", step=5)
    assert answer.json() == {"job_status": "cancelled"}
    after = await user.post(f"/jobs/{running_job}/cancel")
    assert (after.status_code, after.json()["reason"]) == (200, "cancelled_by_user")


async def test_pause_and_resume(worker: Any, user: Any, running_job: str) -> None:
    assert (await user.post(f"/jobs/{running_job}/pause")).json()["status"] == "pausing"
    assert (await user.post(f"/jobs/{running_job}/resume")).status_code == 409
    assert (await worker.post("heartbeat")).json()["wanted"] == "pause"
    answer = await worker.finish("stopped", "stopped_by_request", step=5)
    assert answer.json() == {"job_status": "paused"}
    await worker.schedule()
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "paused"
    assert (await user.post(f"/jobs/{running_job}/resume")).json()["status"] == "queued"
    assert (await worker.take(running_job))["attempt"] == 2


async def test_cancel_and_pause_before_the_claim_need_no_supervisor(
    worker: Any, user: Any, submit: Any
) -> None:
    for action, status in (("cancel", "cancelled"), ("pause", "paused")):
        job_id = await submit(user)
        await worker.schedule()
        attempt = await worker.placed(job_id)
        assert (await user.get(f"/jobs/{job_id}")).json()["status"] == "starting"
        assert (await user.post(f"/jobs/{job_id}/{action}")).json()["status"] == status
        assert (await worker.claim(attempt)).status_code == 409


async def test_the_next_attempt_resumes_from_the_newest_checkpoint(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    store = lone_service.settings.storage.artifact_url
    for step in (20, 10):
        answer = await worker.post(
            "artifacts",
            kind="checkpoint",
            name=f"step-{step:08d}",
            step=step,
            url=f"{store}/{worker.attempt['artifact_prefix']}/checkpoints/step-{step:08d}",
            best=False,
            files=[{"path": "model.safetensors", "size": 3, "sha256": "a" * 64}],
        )
        assert answer.status_code == 200, answer.text
    await worker.finish("stopped", "stopped_by_request", step=20)
    claim = await worker.take(running_job)
    assert claim["resume_from"]["step"] == 20
    assert claim["resume_from"]["url"].endswith("/attempts/1/checkpoints/step-00000020")
    assert claim["resume_from"]["manifest"] == {
        "complete": True,
        "step": 20,
        "files": [{"path": "model.safetensors", "size": 3, "sha256": "a" * 64}],
    }
