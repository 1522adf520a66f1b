"""Jobs as users see them: submission, bad input, lists, polling."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from octrain_api.jobs.schemas import AttemptSummary, JobDetail


async def _count(service: Any) -> int:
    return int((await service.sql("SELECT count(*) AS n FROM jobs"))[0].n)


async def test_a_job_is_stored_with_every_default(service: Any, spec: Any) -> None:
    user = await service.user("grace")
    answer = await user.post("/jobs", json=spec)
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (job["status"], job["is_final"], job["owner"]) == ("queued", False, "grace")
    assert job["spec"]["limits"]["max_restarts"] == 3
    assert job["spec"]["training"]["optimizer"]["lr"] == 3e-4
    assert job["progress"]["total_steps"] == 50
    assert job["queue_position"] >= 1
    assert (await user.get(job["links"]["self"].removeprefix("/v1"))).json()["id"] == job["id"]
    without_prefix = await user.get(f"http://octrain/jobs/{job['id']}")
    assert without_prefix.json()["id"] == job["id"]


async def test_jobs_have_the_form_that_the_document_says(
    service: Any, worker: Any, user: Any, running_job: str, submit: Any
) -> None:
    noted = 'a "quoted" \\ back\nslash, \u2028 and \u00e9'
    waiting = await submit(user, notes=noted, labels={"k": '"'})
    listed = {job["id"]: job for job in (await user.get("/jobs")).json()["items"]}
    for job_id in (running_job, waiting):
        text = (await user.get(f"/jobs/{job_id}")).content
        shown = json.loads(text)
        assert list(shown) == list(JobDetail.model_fields)
        # What the model makes of it is what was sent, times apart, which may be written shorter.
        job = JobDetail.model_validate_json(text)
        again = job.model_dump(mode="json")
        for one in (shown, again):
            one["attempts"] = [AttemptSummary.model_validate(a) for a in one["attempts"]]
        assert again == shown
        parts = (await user.get("/jobs?fields=attempts,status,spec")).json()["items"]
        [part] = [one for one in parts if one["id"] == job_id]
        assert list(part) == ["id", "status", "attempts", "spec"]
        assert all(part[name] == listed[job_id][name] for name in part)
    assert (listed[waiting]["notes"], listed[waiting]["labels"]) == (noted, {"k": '"'})
    assert listed[running_job]["latest_metrics"] == {"train/loss": 5.5}
    assert listed[running_job]["attempts"][0]["node"]


_BAD: list[tuple[str, Any, str]] = [
    ("an unknown key", {"colour": "red"}, "/colour"),
    ("an unknown key inside", {"training": {"stepz": 1}}, "/training/stepz"),
    ("a wrong engine", {"recipe": {"engine": "magic"}}, "/recipe"),
    (
        "a history of no length",
        {"recipe": {"engine": "emulated", "amax_history_len": 0}},
        "/recipe",
    ),
    ("a negative step", {"training": {"steps": -1}}, "/training/steps"),
    ("a NUL character", {"name": "a\x00b"}, "/name"),
    ("half a surrogate pair", {"labels": {"a": "\ud800"}}, "/labels/a"),
    ("an upload", {"data": {"source": "upload", "dataset": "x"}}, "/data/dataset"),
    ("another job", {"model": {"source": "job", "job": "job_x"}}, "/model/job"),
]


@pytest.mark.parametrize(("what", "change", "pointer"), _BAD, ids=[case[0] for case in _BAD])
async def test_bad_specs_are_refused_and_not_stored(
    service: Any, spec: Any, what: str, change: Any, pointer: str
) -> None:
    user = await service.user()
    before = await _count(service)
    answer = await user.post("/jobs", content=json.dumps(spec | change))
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == "/problems/spec-invalid"
    assert problem["status"] == 422
    assert problem["instance"] == "/v1/jobs"
    assert any(error["pointer"].startswith(pointer) for error in problem["errors"]), problem
    assert await _count(service) == before


async def test_every_problem_of_a_spec_is_told_at_once(service: Any, spec: Any) -> None:
    user = await service.user()
    answer = await user.post(
        "/jobs", json=spec | {"colour": 1, "training": {"batch_size": 0, "sequence_length": 64}}
    )
    pointers = {error["pointer"] for error in answer.json()["errors"]}
    assert pointers == {"/colour", "/training/batch_size"}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"a": NaN}', b"\xff", b"[" * 100_000])
async def test_bodies_that_are_no_object(service: Any, body: bytes) -> None:
    answer = await (await service.user()).post("/jobs", content=body)
    assert answer.status_code == 422
    kind = "body-too-complex" if len(body) > 1000 else "spec-invalid"
    assert answer.json()["type"] == f"/problems/{kind}"


async def test_pages_hold_every_job_once_while_jobs_are_added(
    service: Any, spec: Any, submit: Any
) -> None:
    user = await service.user()
    ids = [await submit(user, name=f"n{number}") for number in range(7)]
    seen: list[str] = []
    cursor = None
    while True:
        params = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = (await user.get("/jobs", params=params)).json()
        seen += [job["id"] for job in page["items"]]
        await submit(user)
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ids[::-1]


async def test_lists_are_narrowed(service: Any, submit: Any) -> None:
    user = await service.user()
    a = await submit(user, name="alpha", labels={"team": "nlp", "tier": "1"})
    b = await submit(user, name="beta", labels={"team": "nlp"})
    await user.post(f"/jobs/{b}/cancel")

    async def ids(query: str) -> list[str]:
        answer = await user.get(f"/jobs?{query}")
        assert answer.status_code == 200, answer.text
        return [job["id"] for job in answer.json()["items"]]

    assert await ids("label.team=nlp") == [b, a]
    assert await ids("label.team=nlp&label.tier=1") == [a]
    assert await ids("name=beta") == [b]
    assert await ids("status=cancelled") == [b]
    assert await ids("status=queued,cancelled") == await ids("status=queued&status=cancelled")
    assert await ids("status=running") == []
    for query in ("status=eaten", "limit=0", "cursor=nonsense", "cursor=W10"):
        assert (await user.get(f"/jobs?{query}")).status_code == 422


async def test_an_unchanged_job_is_304(service: Any, submit: Any) -> None:
    user = await service.user()
    job_id = await submit(user)
    first = await user.get(f"/jobs/{job_id}")
    header = {"If-None-Match": first.headers["etag"]}
    await user.post(f"/jobs/{job_id}/pause")
    changed = await user.get(f"/jobs/{job_id}", headers=header)
    assert changed.status_code == 200
    assert changed.json()["version"] > first.json()["version"]
    header = {"If-None-Match": f'"x", {changed.headers["etag"]}'}
    same = await user.get(f"/jobs/{job_id}", headers=header)
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == changed.headers["etag"]


async def test_a_long_poll_ends_at_the_change(service: Any, submit: Any) -> None:
    user = await service.user()
    job_id = await submit(user)
    version = (await user.get(f"/jobs/{job_id}")).json()["version"]
    query = f"/jobs/{job_id}?wait=20&since_version={version}"
    poll = asyncio.create_task(user.get(query))
    while not service.app.state.context.listener._waiting:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await user.post(f"/jobs/{job_id}/cancel")
    answer = await poll
    assert answer.json()["status"] == "cancelled"
    assert time.monotonic() - began < 10
    short = await user.get(f"/jobs/{job_id}?wait=0.2&since_version={answer.json()['version']}")
    assert short.json()["version"] == answer.json()["version"]


async def test_many_long_polls_hold_no_connection(service: Any, submit: Any) -> None:
    """More pollers than the pool has connections, and the service still answers."""
    user = await service.user()
    job_id = await submit(user)
    version = (await user.get(f"/jobs/{job_id}")).json()["version"]
    query = f"/jobs/{job_id}?wait=30&since_version={version}"
    polls = [asyncio.create_task(user.get(query)) for _ in range(60)]
    await asyncio.sleep(0.5)
    assert (await user.post(f"/jobs/{job_id}/cancel")).status_code == 200
    answers = await asyncio.gather(*polls)
    assert {answer.json()["status"] for answer in answers} == {"cancelled"}


async def test_actions_by_state(service: Any, submit: Any) -> None:
    user = await service.user()
    job_id = await submit(user)
    path = f"/jobs/{job_id}"
    assert (await user.post(f"{path}/resume")).json()["status"] == "queued"
    assert (await user.post(f"{path}/pause")).json()["status"] == "paused"
    assert (await user.post(f"{path}/pause")).json()["status"] == "paused"
    assert (await user.post(f"{path}/resume")).json()["status"] == "queued"
    assert (await user.post(f"{path}/cancel")).json()["status"] == "cancelled"
    again = await user.post(f"{path}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")
    for action in ("pause", "resume"):
        refused = await user.post(f"{path}/{action}")
        assert refused.status_code == 409
        assert refused.json()["job_status"] == "cancelled"
    events = (await user.get(f"{path}/events")).json()
    assert [event["data"]["to"] for event in events["items"]] == [
        "queued",
        "paused",
        "queued",
        "cancelled",
    ]
    assert [event["seq"] for event in events["items"]] == [1, 2, 3, 4]
    rest = (await user.get(f"{path}/events?after=2&limit=1")).json()
    assert [event["seq"] for event in rest["items"]] == [3]


async def test_queue_positions_follow_priority_then_age(
    lone_service: Any, user: Any, submit: Any
) -> None:
    low = await submit(user, priority=-5)
    first, second = await submit(user), await submit(user)
    high = await submit(user, priority=10)
    positions = {j["id"]: j["queue_position"] for j in (await user.get("/jobs")).json()["items"]}
    assert positions == {high: 1, first: 2, second: 3, low: 4}
    etag = (await user.get(f"/jobs/{low}")).headers["etag"]
    await user.post(f"/jobs/{high}/cancel")
    moved = await user.get(f"/jobs/{low}", headers={"If-None-Match": etag})
    assert (moved.status_code, moved.json()["queue_position"]) == (200, 3)


async def test_a_job_that_no_registered_node_can_run(
    lone_service: Any, worker: Any, user: Any, spec: Any
) -> None:
    spec["recipe"] = {"engine": "te"}
    answer = await user.post("/jobs", json=spec)
    assert answer.status_code == 422
    assert answer.json()["type"] == "/problems/no-capable-node"
    assert "Transformer Engine is not installed" in answer.json()["detail"]
    assert await _count(lone_service) == 0
    waiting = await user.post("/jobs?allow_waiting=true", json=spec)
    assert waiting.status_code == 201
    await worker.schedule()
    job = (await user.get(f"/jobs/{waiting.json()['id']}")).json()
    assert "Transformer Engine is not installed" in job["waiting_for"]
