"""Uploads of data sets: parts, checks, quotas, and what a spec may use."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octrain_api.controller.uploads import Uploads
from octrain_api.datasets.receiving import receive_part
from octrain_api.settings import DatasetSettings

ROWS = b"".join(b'{"text": "line %d"}\n' % n for n in range(100))
BYTES = {"Content-Type": "application/octet-stream"}


def _announcement(content: bytes, **changes: Any) -> dict[str, Any]:
    return {
        "name": "rows",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "media": "jsonl",
    } | changes


async def _announce(user: Any, content: bytes, **changes: Any) -> dict[str, Any]:
    answer = await user.post("/datasets", json=_announcement(content, **changes))
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def _send(user: Any, dataset_id: str, offset: int, content: bytes) -> Any:
    headers = {**BYTES, "Upload-Offset": str(offset)}
    return await user.patch(f"/datasets/{dataset_id}/content", content=content, headers=headers)


async def _upload(user: Any, content: bytes, **changes: Any) -> str:
    dataset_id = str((await _announce(user, content, **changes))["id"])
    answer = await _send(user, dataset_id, 0, content)
    assert answer.status_code == 204, answer.text
    return dataset_id


async def _show(user: Any, dataset_id: str) -> dict[str, Any]:
    return dict((await user.get(f"/datasets/{dataset_id}")).json())


@pytest.fixture
def uploads(lone_service: Any) -> Uploads:
    return Uploads(lone_service.database, lone_service.settings)


def _files(service: Any) -> list[str]:
    folder = Path(service.folder / "artifacts")
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


async def test_three_parts_with_a_cut_between(
    lone_service: Any, user: Any, uploads: Uploads
) -> None:
    made = await _announce(user, ROWS)
    assert (made["status"], made["received"], made["columns"]) == ("uploading", 0, {"text": "text"})
    assert made["expires_at"] is not None
    path = f"/datasets/{made['id']}/content"
    first = await _send(user, made["id"], 0, ROWS[:700])
    assert (first.status_code, first.headers["upload-offset"]) == (204, "700")
    again = await _send(user, made["id"], 0, ROWS[:700])
    assert (again.status_code, again.json()["type"]) == (409, "/problems/wrong-offset")
    assert again.json()["upload_offset"] == 700

    async def cut_off() -> AsyncIterator[bytes]:
        from starlette.requests import ClientDisconnect

        yield ROWS[700:900]
        raise ClientDisconnect

    got = await receive_part(
        lone_service.database, lone_service.settings, "ada", made["id"], 700, cut_off()
    )
    assert got.offset == 900, "what arrived before the cut is kept"
    head = await user.head(path)
    assert (head.headers["upload-offset"], head.headers["upload-length"]) == ("900", str(len(ROWS)))
    too_much = await _send(user, made["id"], 900, ROWS[900:] + b"x")
    assert (too_much.status_code, too_much.json()["type"]) == (413, "/problems/upload-too-long")
    assert (await user.head(path)).headers["upload-offset"] == "900"
    assert (await _send(user, made["id"], 900, ROWS[900:])).status_code == 204
    assert (await _show(user, made["id"]))["status"] == "checking"
    late = await _send(user, made["id"], len(ROWS), b"x")
    assert late.json()["type"] == "/problems/upload-complete"

    await uploads.check()
    await uploads.clean()
    shown = await _show(user, made["id"])
    assert (shown["status"], shown["rows"], shown["problem_count"]) == ("ready", 100, 0)
    [stored] = _files(lone_service)
    assert stored.startswith("owners/")
    assert stored.endswith(f"/datasets/{made['id']}/data.jsonl")
    assert (lone_service.folder / "artifacts" / stored).read_bytes() == ROWS


async def test_two_senders_of_one_part_do_not_mix(
    lone_service: Any, user: Any, uploads: Uploads
) -> None:
    made = await _announce(user, ROWS)
    answers = await asyncio.gather(
        *(_send(user, made["id"], 0, ROWS[:size]) for size in (500, 900, 1300))
    )
    assert sorted(answer.status_code for answer in answers) == [204, 409, 409]
    offset = (await _show(user, made["id"]))["received"]
    await _send(user, made["id"], offset, ROWS[offset:])
    await uploads.check()
    assert (await _show(user, made["id"]))["status"] == "ready"


async def test_a_part_is_on_the_disk_before_it_is_acknowledged(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await service.user()
    synced: list[int] = []
    real = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    made = await _announce(user, ROWS)
    assert (await _send(user, made["id"], 0, ROWS[:777])).status_code == 204
    assert synced[0] == 777
    assert len(synced) > 1, "and the folders that name it"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert (await _send(user, made["id"], 777, ROWS[777:])).status_code >= 500
    assert (await _show(user, made["id"]))["received"] == 777
    parts = [p for p in Path(service.folder / "artifacts").rglob("*") if p.is_file()]
    assert len(parts) == 1


async def test_the_same_announcement_finds_the_same_upload(user: Any, uploads: Uploads) -> None:
    made = await _announce(user, ROWS)
    await _send(user, made["id"], 0, ROWS[:10])
    again = await user.post("/datasets", json=_announcement(ROWS))
    assert (again.status_code, again.json()["id"], again.json()["received"]) == (
        200,
        made["id"],
        10,
    )
    for changes in ({"name": "other"}, {"columns": {"text": "body"}}, {"sha256": "0" * 64}):
        assert (await _announce(user, ROWS, **changes))["id"] != made["id"]


async def test_bytes_that_are_not_those_announced(
    lone_service: Any, user: Any, uploads: Uploads
) -> None:
    wrong = await _announce(user, ROWS, sha256="0" * 64)
    await _send(user, wrong["id"], 0, ROWS)
    lost = await _upload(user, ROWS)
    for part in Path(lone_service.folder).rglob(f"{lost}/parts/*"):
        part.unlink()
    await uploads.check()
    await uploads.clean()
    shown = await _show(user, wrong["id"])
    assert shown["status"] == "invalid"
    assert hashlib.sha256(ROWS).hexdigest() in shown["problems"][0]["message"]
    assert "upload the file again" in (await _show(user, lost))["problems"][0]["message"]
    assert _files(lone_service) == [], "what is of no use takes no room"
    assert (await _announce(user, ROWS, sha256="0" * 64))["id"] != wrong["id"]


async def test_quotas(lone_service: Any, user: Any) -> None:
    lone_service.settings.datasets = DatasetSettings(
        quota_bytes=5000, max_bytes=4000, max_parts=2, most_per_owner=3
    )
    large = await user.post("/datasets", json=_announcement(ROWS, size=4001))
    assert (large.status_code, large.json()["type"]) == (413, "/problems/dataset-too-large")
    first = await _announce(user, ROWS, size=4000)
    over = await user.post("/datasets", json=_announcement(ROWS, size=1001))
    assert (over.status_code, over.json()["type"]) == (409, "/problems/dataset-quota-exceeded")
    assert (over.json()["bytes_used"], over.json()["bytes_allowed"]) == (4000, 5000)
    listed = (await user.get("/datasets")).json()
    assert (listed["bytes_used"], listed["bytes_allowed"]) == (4000, 5000)
    other = await lone_service.user()
    assert (await other.get("/datasets")).json()["bytes_used"] == 0
    await _announce(other, ROWS, size=4000)
    for offset in (0, 1):
        assert (await _send(user, first["id"], offset, b"x")).status_code == 204
    assert (await _send(user, first["id"], 2, b"x")).json()["type"] == "/problems/too-many-parts"
    await user.delete(f"/datasets/{first['id']}")
    for size in (1, 2, 3):
        await _announce(user, ROWS, size=size)
    many = await user.post("/datasets", json=_announcement(ROWS, size=4))
    assert "3 data sets" in many.json()["detail"]


async def test_only_the_owner_reaches_it(lone_service: Any, user: Any) -> None:
    made = await _announce(user, ROWS)
    other = await lone_service.user()
    assert (await other.get(f"/datasets/{made['id']}")).status_code == 404
    assert (await other.delete(f"/datasets/{made['id']}")).status_code == 404
    assert (await _send(other, made["id"], 0, ROWS)).status_code == 404
    assert (await other.head(f"/datasets/{made['id']}/content")).status_code == 404
    assert (await other.get("/datasets")).json()["items"] == []
    names = [str((await _announce(user, ROWS, name=f"n{n}"))["id"]) for n in range(4)]
    seen, cursor = [], None
    while True:
        params = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = (await user.get("/datasets", params=params)).json()
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [*reversed(names), made["id"]]
    found = (await user.get("/datasets", params={"name": "n2", "status": "uploading"})).json()
    assert [item["id"] for item in found["items"]] == [names[2]]


_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"size": 0}, "/size"),
    ({"sha256": "A" * 64}, "/sha256"),
    ({"media": "csv"}, "/media"),
    ({"format": "poem"}, "/format"),
    ({"columns": {"texts": "x"}}, "/columns/texts"),
    ({"name": ""}, "/name"),
    ({"extra": 1}, "/extra"),
    ({"media": "text", "format": "chat"}, ""),
]


async def test_announcements_that_are_refused(service: Any) -> None:
    user = await service.user()
    for changes, pointer in _REFUSALS:
        answer = await user.post("/datasets", json=_announcement(ROWS, **changes))
        assert answer.status_code == 422, changes
        assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
    made = await _announce(user, ROWS)
    answer = await user.patch(f"/datasets/{made['id']}/content", content=b"x", headers=BYTES)
    assert answer.status_code == 422, "the offset is missing"


async def test_unfinished_and_deleted_uploads_are_removed(
    lone_service: Any, user: Any, uploads: Uploads
) -> None:
    old, young, invalid = [await _announce(user, ROWS, name=n) for n in ("old", "young", "bad")]
    for made in (old, young):
        await _send(user, made["id"], 0, ROWS[:50])
    await _send(user, invalid["id"], 0, b"x" * len(ROWS))
    await uploads.check()
    await lone_service.sql(
        "UPDATE datasets SET updated_at = now() - interval '25 hours' WHERE id <> :id",
        id=young["id"],
    )
    await uploads.clean()
    assert (await user.get(f"/datasets/{old['id']}")).status_code == 404
    assert (await _send(user, old["id"], 50, b"x")).status_code == 404
    assert (await user.get(f"/datasets/{invalid['id']}")).status_code == 200
    [left] = _files(lone_service)
    assert young["id"] in left
    assert (await user.delete(f"/datasets/{young['id']}")).status_code == 204
    await lone_service.sql("UPDATE datasets SET updated_at = now() - interval '8 days'")
    await uploads.clean()
    assert _files(lone_service) == []
    assert await lone_service.sql("SELECT 1 FROM datasets") == []


async def test_a_check_that_was_left_is_made_anew(
    lone_service: Any, user: Any, uploads: Uploads
) -> None:
    dataset_id = await _upload(user, ROWS)
    await lone_service.sql("UPDATE datasets SET claimed_until = now() + interval '1 hour'")
    await uploads.check()
    assert (await _show(user, dataset_id))["status"] == "checking", "another one checks it"
    await lone_service.sql("UPDATE datasets SET claimed_until = now()")
    await uploads.check()
    assert (await _show(user, dataset_id))["status"] == "ready"


async def test_what_a_spec_may_use(
    lone_service: Any, user: Any, uploads: Uploads, worker: Any, spec: Any
) -> None:
    ready = await _upload(user, ROWS)
    labelled = await _upload(user, b'{"text": "a", "kind": "x"}\n', format="labelled",
                             columns={"label": "kind"})  # fmt: skip
    unfinished = (await _announce(user, ROWS, name="unfinished"))["id"]
    await uploads.check()

    async def errors(client: Any = user, **data: Any) -> list[tuple[str, str]]:
        body = spec | {"data": {"source": "upload"} | data}
        answer = await client.post("/jobs", json=body)
        assert answer.status_code == 422, answer.text
        return [(error["pointer"], error["code"]) for error in answer.json()["errors"]]

    assert await errors(dataset="ds_none") == [("/data/dataset", "not_found")]
    assert await errors(dataset=unfinished) == [("/data/dataset", "not_ready")]
    assert await errors(dataset=ready, format="chat") == [("/data/format", "format")]
    assert await errors(dataset=ready, sha256="0" * 64) == [("/data/sha256", "sha256")]
    assert await errors(dataset=ready, columns={"text": "body"}) == [
        ("/data/columns/text", "column")
    ]
    other = await lone_service.user()
    admin = lone_service.client(await lone_service.key("operations", "admin"))
    for client in (other, admin):
        assert await errors(client, dataset=ready) == [("/data/dataset", "not_found")]
    task = {"task": "sequence_classification"}
    body = spec | task | {"data": {"source": "upload", "dataset": labelled, "format": "labelled"}}
    answer = await user.post("/jobs", json=body)
    assert [e["pointer"] for e in answer.json()["errors"]] == ["/data/columns/label"]

    body = spec | {"data": {"source": "upload", "dataset": ready}}
    job = (await user.post("/jobs", json=body)).json()
    digest = hashlib.sha256(ROWS).hexdigest()
    assert job["spec"]["data"]["sha256"] == digest
    refused = await user.delete(f"/datasets/{ready}")
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/dataset-in-use")
    assert refused.json()["jobs"] == [job["id"]]
    claim = await worker.take(job["id"])
    point = claim["dataset_from"]
    assert (point["dataset"], point["path"], point["sha256"]) == (ready, "data.jsonl", digest)
    place = Path(point["url"].removeprefix("file://")) / point["path"]
    assert place.read_bytes() == ROWS
    await worker.finish("succeeded", "completed")
    assert (await user.delete(f"/datasets/{ready}")).status_code == 204
    again = await user.post("/jobs", json=job["spec"] | {"name": "again"})
    assert again.json()["errors"][0]["code"] == "not_found"
