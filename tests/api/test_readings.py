"""What readers get: metrics, logs, the live stream, artifacts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest


def _metrics(step: int, **values: Any) -> dict[str, Any]:
    return {"type": "metrics", "step": step, "values": values}


async def _points(user: Any, job_id: str, query: str = "") -> dict[tuple[str, int], Any]:
    answer = await user.get(f"/jobs/{job_id}/metrics{query}")
    assert answer.status_code == 200, answer.text
    return {(s["name"], s["attempt"]): s["points"] for s in answer.json()["series"]}


async def test_non_finite_values_survive(worker: Any, user: Any, running_job: str) -> None:
    odd = ["NaN", "Infinity", "-Infinity", 0.1]
    await worker.telemetry(3, *(_metrics(n, odd=value) for n, value in enumerate(odd)))
    points = await _points(user, running_job, "?keys=odd")
    assert points == {("odd", 1): [[n, value] for n, value in enumerate(odd)]}
    latest = (await user.get(f"/jobs/{running_job}")).json()["latest_metrics"]
    assert latest == {"train/loss": 5.5, "odd": 0.1}


async def test_the_newest_attempt_wins_where_steps_repeat(
    worker: Any, user: Any, running_job: str
) -> None:
    await worker.telemetry(3, *(_metrics(step, x=float(step)) for step in range(1, 8)))
    await worker.finish("stopped", "stopped_by_request", step=7)
    await worker.take(running_job)
    await worker.telemetry(1, *(_metrics(step, x=100.0 + step) for step in range(5, 10)))
    points = await _points(user, running_job, "?keys=x")
    assert points == {
        ("x", 1): [[s, float(s)] for s in range(1, 5)],
        ("x", 2): [[s, 100.0 + s] for s in range(5, 10)],
    }
    raw = await _points(user, running_job, "?keys=x&attempt=1")
    assert len(raw["x", 1]) == 7
    some = await _points(user, running_job, "?keys=x&from_step=4&to_step=6")
    assert some == {("x", 1): [[4, 4.0]], ("x", 2): [[5, 105.0], [6, 106.0]]}


async def test_buckets_keep_spikes(worker: Any, user: Any, running_job: str) -> None:
    values: list[Any] = [float(step % 7) for step in range(1000)]
    values[437], values[700], values[999] = 1e9, -1e9, 3.25
    values[850] = "NaN"
    await worker.telemetry(3, *(_metrics(step, y=value) for step, value in enumerate(values)))
    points = (await _points(user, running_job, "?keys=y&max_points=90"))["y", 1]
    assert len(points) <= 90
    for kept in ([437, 1e9], [700, -1e9], [999, 3.25], [850, "NaN"]):
        assert kept in points
    assert [step for step, _ in points] == sorted(step for step, _ in points)


@pytest.fixture
async def stored(worker: Any, user: Any, running_job: str, lone_service: Any) -> dict[str, Any]:
    """A registered model of two files that lie in the store."""
    prefix = worker.attempt["artifact_prefix"]
    folder = lone_service.folder / "artifacts" / prefix / "model"
    (folder / "sub").mkdir(parents=True)
    files = []
    for path, content in (("config.json", b"{}"), ("sub/model.safetensors", b"\x00\x01" * 5000)):
        (folder / path).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        files.append({"path": path, "size": len(content), "sha256": digest})
    url = f"{lone_service.settings.storage.artifact_url}/{prefix}/model"
    body = {"kind": "model", "name": "model", "step": 5, "url": url, "files": files}
    first = await worker.post("artifacts", **body)
    again = await worker.post("artifacts", **body)
    assert first.json() == again.json()
    return {"id": first.json()["artifact_id"], "folder": folder, "body": body}


async def test_artifacts_are_listed_and_downloaded(
    user: Any, running_job: str, stored: Any
) -> None:
    [artifact] = (await user.get(f"/jobs/{running_job}/artifacts")).json()["items"]
    assert (artifact["id"], artifact["kind"], artifact["size"]) == (stored["id"], "model", 10002)
    assert artifact["files"] == stored["body"]["files"]
    base = f"/jobs/{running_job}/artifacts/{artifact['id']}/files"
    for file in artifact["files"]:
        answer = await user.get(f"{base}/{file['path']}")
        assert answer.status_code == 200
        assert hashlib.sha256(answer.content).hexdigest() == file["sha256"]
        assert answer.headers["etag"] == f'"{file["sha256"]}"'
    part = await user.get(f"{base}/sub/model.safetensors", headers={"Range": "bytes=1-3"})
    assert (part.status_code, part.content) == (206, b"\x01\x00\x01")
    assert part.headers["content-range"] == "bytes 1-3/10000"
    assert (await user.get(f"/jobs/{running_job}/artifacts?kind=report")).json()["items"] == []


@pytest.mark.parametrize("place", ["folder", "object store"])
async def test_parts_of_a_file_wherever_it_lies(
    user: Any, running_job: str, stored: Any, lone_service: Any, place: str
) -> None:
    path, whole = "sub/model.safetensors", b"\x00\x01" * 5000
    if place == "object store":
        fsspec.filesystem("memory").pipe(f"/{running_job}/{path}", whole)
        await lone_service.sql("UPDATE artifacts SET url = :url", url=f"memory://{running_job}")
    url = f"/jobs/{running_job}/artifacts/{stored['id']}/files/{path}"
    answer = await user.get(url)
    assert (answer.status_code, answer.content) == (200, whole)
    etag = answer.headers["etag"]
    part = await user.get(url, headers={"Range": "bytes=9000-", "If-Range": etag})
    assert (part.status_code, part.content) == (206, whole[9000:])
    assert (part.headers["content-range"], part.headers["etag"]) == ("bytes 9000-9999/10000", etag)
    beyond = await user.get(url, headers={"Range": "bytes=10000-"})
    assert (beyond.status_code, beyond.json()["type"]) == (416, "/problems/range-not-satisfiable")
    assert beyond.headers["content-range"] == "bytes */10000"
    other = {"Range": "bytes=0-9", "If-Range": '"other"'}
    for ignored in (other, {"Range": "bytes=a-b"}, {"Range": "bytes=0-1,4-5"}, {"Range": "x"}):
        answer = await user.get(url, headers=ignored)
        assert (answer.status_code, answer.content) == (200, whole), ignored


async def test_only_registered_files_below_the_store_are_served(
    user: Any, running_job: str, stored: Any
) -> None:
    base = f"/jobs/{running_job}/artifacts/{stored['id']}/files"
    (stored["folder"] / "other").write_text("secret")
    for path in ("other", "../model/other", "%2e%2e/x", "/etc/passwd", "config.json/x"):
        assert (await user.get(f"{base}/{path}")).status_code == 404, path
    (stored["folder"] / "config.json").unlink()
    gone = await user.get(f"{base}/config.json")
    assert (gone.status_code, gone.json()["type"]) == (404, "/problems/file-not-in-store")
    (stored["folder"] / "config.json").symlink_to("/etc/passwd")
    assert (await user.get(f"{base}/config.json")).status_code == 404


@pytest.mark.parametrize("url", ["nosuch://bucket/a", "file://[x/a", "memory://[x/a", "", "a:b"])
async def test_a_store_that_this_server_cannot_read_is_told(
    user: Any, running_job: str, stored: Any, lone_service: Any, url: str
) -> None:
    """A node names the URL of its store: one for which this server lacks the driver, perhaps."""
    await lone_service.sql("UPDATE artifacts SET url = :url", url=url)
    files = f"/jobs/{running_job}/artifacts/{stored['id']}/files"
    for asked in (f"{files}/config.json", f"/jobs/{running_job}/model"):
        answer = await user.get(asked)
        assert (answer.status_code, answer.json()["type"]) == (404, "/problems/file-not-in-store")
    assert (await user.get(f"/jobs/{running_job}/artifacts")).status_code == 200


@pytest.mark.parametrize("damage", ["", "{", "[" * 100_000, "7", "[7]", '{"rows": 7}', "\x00"])
async def test_a_damaged_report_is_told(
    worker: Any, user: Any, running_job: str, lone_service: Any, damage: str
) -> None:
    store, prefix = lone_service.settings.storage.artifact_url, worker.attempt["artifact_prefix"]
    for kind, name in (("conversion", "conversion.json"), ("report", "precision.json")):
        place = Path(store.removeprefix("file://")) / prefix / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(damage)
        file = {"path": name, "size": len(damage), "sha256": "0" * 64}
        body = {"kind": kind, "name": name, "url": f"{store}/{prefix}", "files": [file]}
        assert (await worker.post("artifacts", **body)).status_code == 200
    for asked in ("conversion", "precision"):
        answer = await user.get(f"/jobs/{running_job}/{asked}")
        assert (answer.status_code, answer.json()["type"]) == (404, "/problems/file-not-in-store")
        assert "is damaged" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"url": "file:///etc"}, "/url"),
        ({"url": "STORE/jobs/job_other/attempts/1/model"}, "/url"),
        ({"url": "STORE/PREFIX/../../x"}, "/url"),
        ({"url": "STORE/PREFIX0/model"}, "/url"),
        ({"files": [{"path": "../x", "size": 1, "sha256": "0" * 64}]}, "/files/0/path"),
        ({"files": [{"path": "/etc/x", "size": 1, "sha256": "0" * 64}]}, "/files/0/path"),
        ({"files": [{"path": "a", "size": 1, "sha256": "x"}]}, "/files/0/sha256"),
        ({"files": []}, "/files"),
        ({"kind": "virus"}, "/kind"),
    ],
)
async def test_files_elsewhere_cannot_be_registered(
    worker: Any, running_job: str, lone_service: Any, change: Any, pointer: str
) -> None:
    store, prefix = lone_service.settings.storage.artifact_url, worker.attempt["artifact_prefix"]
    body = {
        "kind": "model",
        "name": "m",
        "url": f"{store}/{prefix}/model",
        "files": [{"path": "a", "size": 1, "sha256": "0" * 64}],
    } | change
    body["url"] = body["url"].replace("STORE", store).replace("PREFIX", prefix)
    answer = await worker.post("artifacts", **body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == pointer


async def test_the_conversion_report(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    missing = await user.get(f"/jobs/{running_job}/conversion")
    assert missing.status_code == 404
    prefix = worker.attempt["artifact_prefix"]
    rows = [{"name": "lm_head", "from": "Linear", "to": None, "group": None, "reason": "head"}]
    content = json.dumps(rows).encode()
    place = lone_service.folder / "artifacts" / prefix
    place.mkdir(parents=True)
    (place / "conversion.json").write_bytes(content)
    file = {
        "path": "conversion.json",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    url = f"{lone_service.settings.storage.artifact_url}/{prefix}"
    answer = await worker.post(
        "artifacts", kind="conversion", name="conversion.json", url=url, files=[file]
    )
    assert answer.status_code == 200, answer.text
    report = (await user.get(f"/jobs/{running_job}/conversion")).json()
    assert report == {"attempt": 1, "rows": rows}


async def test_the_precision_table(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    missing = await user.get(f"/jobs/{running_job}/precision")
    assert missing.status_code == 404
    assert "first step" in missing.json()["detail"]
    prefix = worker.attempt["artifact_prefix"]
    place = lone_service.folder / "artifacts" / prefix
    place.mkdir(parents=True)
    rows = {"weights": {"formats": {"fp32": {"bytes": 8, "elements": 2}}, "bytes": 8}}
    table = {"format": 1, "step": 1, "engine": "emulated", "rows": rows, "engine_state": {}}
    url = f"{lone_service.settings.storage.artifact_url}/{prefix}"
    # The report of the run is another artifact of the same kind, and newer.
    for name, value in (("precision.json", table), ("report.json", {"format": 1})):
        content = json.dumps(value).encode()
        (place / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        file = {"path": name, "size": len(content), "sha256": digest}
        answer = await worker.post("artifacts", kind="report", name=name, url=url, files=[file])
        assert answer.status_code == 200, answer.text
    found = (await user.get(f"/jobs/{running_job}/precision")).json()
    assert found == {
        "attempt": 1,
        "step": 1,
        "engine": "emulated",
        "rows": rows,
        "engine_state": {},
    }
    job = (await user.get(f"/jobs/{running_job}")).json()
    assert job["links"]["precision"] == f"/v1/jobs/{running_job}/precision"
