"""Drafts, clones, changes, bulk cancel, deletion, and lists narrowed and sorted."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from octrain_api.jobs.overrides import overridden


async def test_a_draft_waits_and_starts_checked_anew(
    worker: Any, user: Any, spec: Any, lone_service: Any
) -> None:
    made = await user.post("/jobs?draft=true", json=spec)
    assert made.status_code == 201
    job = made.json()
    assert (job["status"], job["is_final"]) == ("draft", False)
    assert await worker.schedule() == 0, "a draft is not placed"
    assert (await user.post(f"/jobs/{job['id']}/resume")).status_code == 409
    assert (await user.post(f"/jobs/{job['id']}/pause")).status_code == 409
    changed = await user.patch(f"/jobs/{job['id']}", json={"spec": {"training": {"steps": 7}}})
    assert changed.json()["spec"]["training"]["steps"] == 7
    assert changed.json()["spec"]["training"]["batch_size"] == 4, "the rest stays"
    assert changed.json()["progress"]["total_steps"] == 7
    wrong = await user.patch(f"/jobs/{job['id']}", json={"spec": {"training": {"steps": 0}}})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (422, "/training/steps")
    # A file that was there when it was drafted is gone by its start.
    shared = lone_service.folder / "shared" / "data.jsonl"
    shared.write_text('{"text": "a"}\n')
    data = {"source": "jsonl", "path": "data.jsonl"}
    await user.patch(f"/jobs/{job['id']}", json={"spec": {"data": data}})
    shared.write_text("no json\n")
    refused = await user.post(f"/jobs/{job['id']}/start")
    assert refused.status_code == 422
    shared.write_text('{"text": "a"}\n')
    started = await user.post(f"/jobs/{job['id']}/start")
    assert (started.status_code, started.json()["status"]) == (200, "queued")
    again = await user.post(f"/jobs/{job['id']}/start")
    assert (again.status_code, again.json()["version"]) == (200, started.json()["version"])
    assert await worker.schedule() == 1
    late = await user.patch(f"/jobs/{job['id']}", json={"spec": {"training": {"steps": 8}}})
    assert late.status_code == 409


async def test_a_draft_can_be_cancelled_and_deleted(service: Any, spec: Any) -> None:
    user = await service.user()
    one, two = [(await user.post("/jobs?draft=true", json=spec)).json()["id"] for _ in range(2)]
    assert (await user.post(f"/jobs/{one}/cancel")).json()["status"] == "cancelled"
    assert (await user.delete(f"/jobs/{two}")).status_code == 204
    assert (await user.get(f"/jobs/{two}")).status_code == 404


async def test_changes_merge_labels_and_raise_the_version(service: Any, submit: Any) -> None:
    user = await service.user()
    job_id = await submit(user, labels={"team": "nlp", "old": "x"})
    before = (await user.get(f"/jobs/{job_id}")).json()
    body = {"name": "new", "labels": {"old": None, "run": "7"}, "notes": "n", "priority": 9}
    after = (await user.patch(f"/jobs/{job_id}", json=body)).json()
    assert (after["name"], after["notes"], after["priority"]) == ("new", "n", 9)
    assert after["labels"] == {"team": "nlp", "run": "7"}
    assert after["spec"]["labels"] == after["labels"]
    assert after["version"] > before["version"]
    events = (await user.get(f"/jobs/{job_id}/events?kind=changed")).json()["items"]
    assert events[0]["data"]["fields"] == ["labels", "name", "notes", "priority"]
    for wrong in ({"priority": 1000}, {"labels": {"a": "x" * 300}}, {"status": "queued"}):
        assert (await user.patch(f"/jobs/{job_id}", json=wrong)).status_code == 422
    stranger = await service.user()
    assert (await stranger.patch(f"/jobs/{job_id}", json=body)).status_code == 404
    unchanged = (await user.patch(f"/jobs/{job_id}", json={})).json()
    assert unchanged["version"] == after["version"]


async def test_a_clone_is_a_new_job_with_overrides(service: Any, submit: Any, spec: Any) -> None:
    user = await service.user()
    job_id = await submit(user)
    body = {"name": "other", "recipe": {"engine": "amp", "dtype": "bf16"}, "labels": {"team": None}}
    made = await user.post(f"/jobs/{job_id}/clone", json=body)
    assert made.status_code == 201, made.text
    clone = made.json()
    assert clone["id"] != job_id
    assert clone["spec"]["recipe"]["engine"] == "amp"
    assert "amax_history_len" not in clone["spec"]["recipe"], "another engine begins anew"
    assert clone["spec"]["training"]["steps"] == spec["training"]["steps"]
    assert clone["labels"] == {}
    events = (await user.get(f"/jobs/{clone['id']}/events?kind=cloned")).json()["items"]
    assert events[0]["data"] == {"from_job": job_id}
    plain = await user.post(f"/jobs/{job_id}/clone?draft=true")
    assert plain.json()["status"] == "draft"
    assert plain.json()["spec"] == (await user.get(f"/jobs/{job_id}")).json()["spec"]
    wrong = await user.post(f"/jobs/{job_id}/clone", json={"training": {"steps": "many"}})
    assert wrong.status_code == 422
    stranger = await service.user()
    assert (await stranger.post(f"/jobs/{job_id}/clone")).status_code == 404


def test_parts_of_another_kind_begin_anew() -> None:
    spec = {
        "recipe": {"engine": "te", "scaling": "delayed", "margin": 2},
        "training": {"steps": 5, "schedule": {"name": "linear", "warmup_steps": 3}},
    }
    same = overridden(spec, {"recipe": {"engine": "te", "margin": 1}})
    assert same["recipe"] == {"engine": "te", "scaling": "delayed", "margin": 1}
    other = overridden(spec, {"recipe": {"scaling": "current"}})
    assert other["recipe"] == {"scaling": "current"}
    named = overridden(spec, {"recipe": {"name": "std"}})
    assert named["recipe"] == {"name": "std"}
    schedule = overridden(spec, {"training": {"schedule": {"name": "constant"}}})
    assert schedule["training"] == {"steps": 5, "schedule": {"name": "constant"}}
    assert spec["training"]["schedule"] == {"name": "linear", "warmup_steps": 3}


async def test_many_jobs_are_cancelled_at_once(service: Any, submit: Any) -> None:
    user, stranger = await service.user(), await service.user()
    nlp = [await submit(user, labels={"team": "nlp"}) for _ in range(3)]
    other = await submit(user, labels={"team": "vision"})
    foreign = await submit(stranger, labels={"team": "nlp"})
    found = (await user.post("/jobs:cancel", json={"labels": {"team": "nlp"}})).json()
    assert [item["job_id"] for item in found["items"]] == sorted(nlp)
    assert {item["status"] for item in found["items"]} == {"cancelled"}
    assert found["more"] is False
    again = (await user.post("/jobs:cancel", json={"labels": {"team": "nlp"}})).json()
    assert again["items"] == [], "filters find unfinished jobs only"
    named = (await user.post("/jobs:cancel", json={"ids": [other, foreign, "job_none"]})).json()
    by_id = {item["job_id"]: item for item in named["items"]}
    assert by_id[other]["status"] == "cancelled"
    assert by_id[foreign]["status"] is None, "another owner's job looks like none"
    assert "There is no job" in by_id["job_none"]["problem"]
    assert (await stranger.get(f"/jobs/{foreign}")).json()["status"] == "queued"
    bodies: list[Any] = [{}, {"ids": [other], "every": True}, {"ids": []}, {"every": False}]
    for wrong in bodies:
        assert (await user.post("/jobs:cancel", json=wrong)).status_code == 422
    every = (await stranger.post("/jobs:cancel", json={"every": True})).json()
    assert [item["job_id"] for item in every["items"]] == [foreign]


async def test_a_deleted_job_leaves_its_trail_only(
    worker: Any, user: Any, running_job: str, lone_service: Any, submit: Any
) -> None:
    job_id = running_job
    assert (await user.delete(f"/jobs/{job_id}")).status_code == 409, "it still runs"
    await worker.telemetry(
        3, {"seq": 3, "time": 3.0, "type": "log", "stream": "stdout", "text": "a secret"}
    )
    url = f"{lone_service.settings.storage.artifact_url}/jobs/{job_id}/attempts/1/model"
    file = {"path": "config.json", "size": 2, "sha256": "0" * 64}
    stored = await worker.post("artifacts", kind="model", name="model", url=url, files=[file])
    assert stored.status_code == 200, stored.text
    await worker.finish("succeeded", "completed", step=1)
    model = {"source": "job", "job": job_id}
    user_of_it = await submit(user, model=model)
    in_use = await user.delete(f"/jobs/{job_id}")
    assert (in_use.status_code, in_use.json()["job_id"]) == (409, user_of_it)
    await user.post(f"/jobs/{user_of_it}/cancel")

    assert (await user.delete(f"/jobs/{job_id}")).status_code == 204
    assert (await user.delete(f"/jobs/{job_id}")).status_code == 404
    for path in ("", "/metrics", "/logs", "/artifacts", "/model"):
        assert (await user.get(f"/jobs/{job_id}{path}")).status_code == 404, path
    listed = (await user.get("/jobs?limit=500")).json()["items"]
    assert job_id not in [item["id"] for item in listed]
    events = (await user.get(f"/jobs/{job_id}/events")).json()["items"]
    assert [event["kind"] for event in events][-1] == "deleted"
    assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
    for table in ("metric_layouts", "metric_blocks", "log_chunks", "artifacts"):
        rows = await lone_service.sql(
            f"SELECT count(*) AS n FROM {table} WHERE job_id = :job", job=job_id
        )
        assert rows[0].n == 0, table
    rows = await lone_service.sql("SELECT spec::text AS s FROM jobs WHERE id = :job", job=job_id)
    assert rows[0].s == "{}"
    # The node is told to remove the files, once nobody can be reading them any more.
    await lone_service.sql("UPDATE leftovers SET not_before = now()")
    beat = await worker.http.post(
        f"/nodes/{worker.node_id}/heartbeat", json={"active_attempts": []}
    )
    assert any(job_id in order["url"] for order in beat.json()["leftovers"]), beat.text


async def test_lists_are_narrowed_sorted_and_cut(service: Any, submit: Any) -> None:
    user = await service.user()
    ids = [await submit(user, name=f"n{n % 3}", priority=n % 2) for n in range(7)]
    await user.post(f"/jobs/{ids[0]}/cancel")

    async def listed(**params: Any) -> list[str]:
        found: list[str] = []
        cursor: str | None = None
        while True:
            more = {"cursor": cursor} if cursor else {}
            answer = await user.get("/jobs", params={"limit": 2} | params | more)
            assert answer.status_code == 200, answer.text
            found += [item["id"] for item in answer.json()["items"]]
            cursor = answer.json()["next_cursor"]
            if cursor is None:
                return found

    assert await listed() == ids[::-1]
    assert await listed(sort="created_at") == ids
    name = {job_id: f"n{n % 3}" for n, job_id in enumerate(ids)}
    assert await listed(sort="name") == sorted(ids, key=lambda i: (name[i], i))
    rank = {job_id: n % 2 for n, job_id in enumerate(ids)}
    assert await listed(sort="-priority") == sorted(ids, key=lambda i: (rank[i], i), reverse=True)
    assert (await listed(sort="ended_at"))[0] == ids[0]
    assert (await listed(sort="-ended_at"))[-1] == ids[0]
    assert await listed(q="N1", sort="created_at") == [ids[1], ids[4]]
    assert await listed(q=ids[2]) == [ids[2]]
    assert await listed(q="%") == []
    middle = (await user.get(f"/jobs/{ids[3]}")).json()["created_at"]
    assert await listed(created_after=middle, sort="created_at") == ids[3:]
    assert await listed(created_before=middle, sort="created_at") == ids[:3]
    assert await listed(ended_after="2020-01-01") == [ids[0]]
    future = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert await listed(created_after=future) == []
    one = (await user.get("/jobs?fields=status,progress&limit=1")).json()["items"][0]
    assert set(one) == {"id", "status", "progress"}
    page = (await user.get("/jobs?limit=2")).json()
    for wrong in (
        "sort=color",
        "fields=color",
        "fields=",
        "created_after=soon",
        "cursor=x",
        f"cursor={page['next_cursor']}&sort=name",
    ):
        answer = await user.get(f"/jobs?{wrong}")
        assert answer.status_code == 422, wrong


async def test_the_model_comes_as_one_archive(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    job_id = running_job
    assert (await user.get(f"/jobs/{job_id}/model")).status_code == 404
    folder = Path(lone_service.folder) / "artifacts/jobs" / job_id / "attempts/1/model"
    (folder / "sub").mkdir(parents=True)
    contents = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 9, "sub/x": b""}
    for path, content in contents.items():
        (folder / path).write_bytes(content)
    files = [{"path": p, "size": len(c), "sha256": "0" * 64} for p, c in contents.items()]
    await worker.post("artifacts", kind="model", name="model", url=folder.as_uri(), files=files)
    answer = await user.get(f"/jobs/{job_id}/model")
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        found = {
            member.name.removeprefix(f"{job_id}/"): archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    card = found.pop("README.md").decode()
    assert found == contents
    assert job_id in card
    recipe = json.loads(card.split("## Recipe")[1].split("```json")[1].split("```")[0])
    assert recipe == (await user.get(f"/jobs/{job_id}")).json()["spec"]["recipe"]
    whole = answer.content
    etag = answer.headers["etag"]
    for text, start, end in (
        ("bytes=0-9", 0, 10),
        ("bytes=700-", 700, len(whole)),
        ("bytes=-100", len(whole) - 100, len(whole)),
        (f"bytes=5-{len(whole) + 50}", 5, len(whole)),
    ):
        part = await user.get(f"/jobs/{job_id}/model", headers={"Range": text, "If-Range": etag})
        assert part.status_code == 206
        assert part.content == whole[start:end]
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{len(whole)}"
    beyond = await user.get(f"/jobs/{job_id}/model", headers={"Range": f"bytes={len(whole)}-"})
    assert beyond.status_code == 416
    other = {"Range": "bytes=0-9", "If-Range": '"other"'}
    assert (await user.get(f"/jobs/{job_id}/model", headers=other)).status_code == 200
    for ignored in ("bytes=5-2", "bytes=a-b", "lines=1-2", "bytes=0-1,4-5", "bytes=-"):
        answer = await user.get(f"/jobs/{job_id}/model", headers={"Range": ignored})
        assert (answer.status_code, answer.content) == (200, whole)


@pytest.mark.parametrize("action", ["clone", "start", "cancel"])
async def test_many_at_once_stay_whole(service: Any, submit: Any, action: str) -> None:
    user = await service.user()
    job_id = await submit(user)
    answers = await asyncio.gather(
        *(user.post(f"/jobs/{job_id}/{action}") for _ in range(6)),
        user.patch(f"/jobs/{job_id}", json={"notes": "x"}),
    )
    assert {answer.status_code for answer in answers} <= {200, 201}
    events = (await user.get(f"/jobs/{job_id}/events")).json()["items"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))


async def test_a_supervisor_of_a_deleted_job_is_stale(
    worker: Any, user: Any, running_job: str
) -> None:
    """It stops for that; an attempt that is not there it would take for a fault of the service."""
    await user.post(f"/jobs/{running_job}/cancel")
    await worker.finish("stopped", "cancelled_by_user")
    assert (await user.delete(f"/jobs/{running_job}")).status_code == 204
    for answer in (await worker.post("heartbeat"), await worker.finish("failed", "worker_lost")):
        assert answer.status_code == 409, answer.text
        assert answer.json()["type"] == "/problems/stale-attempt"
        assert "deleted" in answer.json()["detail"]
