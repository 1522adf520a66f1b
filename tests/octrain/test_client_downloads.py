"""Artifacts to disk: checked, kept, and never outside their folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octrain.client import (
    OctrainError,
)

JobObject = Callable[..., dict[str, Any]]


def artifact_routes(
    server: Any, reply: Any, files: dict[str, bytes], sha: str | None = None
) -> None:
    listed = [
        {"path": path, "size": len(data), "sha256": sha or hashlib.sha256(data).hexdigest()}
        for path, data in files.items()
    ]
    artifact = {"id": "art_1", "kind": "model", "name": "model", "step": 10, "files": listed}
    server.routes["GET /v1/jobs/job_1/artifacts"] = lambda r: reply({"items": [artifact]})
    for path, data in files.items():
        server.routes[f"GET /v1/jobs/job_1/artifacts/art_1/files/{path}"] = lambda r, data=data: (
            reply(data, content_type="application/octet-stream")
        )


def test_download_fetches_checks_and_keeps_what_is_there(
    client: Any, server: Any, reply: Any, job_object: JobObject, tmp_path: Path
) -> None:
    files = {"config.json": b"{}", "shards/one.safetensors": b"x" * 100_000}
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    artifact_routes(server, reply, files)
    job = client.jobs.get("job_1")
    moved: list[int] = []
    folder = job.download("model", tmp_path / "m", on_progress=lambda p, r, t: moved.append(r))
    assert {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    } == (files)
    assert moved[-1] == 100_002
    before = len(server.requests)
    job.download("model", folder)
    assert len(server.requests) == before + 1, "only the list is asked for again"


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_goes_on_where_its_connection_broke(
    client: Any, server: Any, reply: Any, job_object: JobObject, tmp_path: Path, ranges: bool
) -> None:
    data = bytes(range(256)) * 2000
    digest = hashlib.sha256(data).hexdigest()
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    artifact_routes(server, reply, {"model.safetensors": data})
    asked: list[str | None] = []

    def serve(request: Any) -> Any:
        wanted = request.headers.get("range")
        asked.append(wanted)
        if len(asked) == 2:
            return reply({"detail": "It is being started again."}, 503)
        if wanted is None or not ranges:
            return reply(data, cut=300_000 if len(asked) == 1 else None)
        assert request.headers["if-range"] == f'"{digest}"'
        return reply(data[int(wanted.removeprefix("bytes=").removesuffix("-")) :], 206)

    server.routes["GET /v1/jobs/job_1/artifacts/art_1/files/model.safetensors"] = serve
    told: list[tuple[int, int]] = []
    folder = client.jobs.get("job_1").download(
        "model", tmp_path / "m", on_progress=lambda path, have, total: told.append((have, total))
    )
    assert (folder / "model.safetensors").read_bytes() == data
    assert told[-1] == (len(data), len(data))
    assert (asked[0], len(asked)) == (None, 3)
    assert None not in asked[1:], "what had arrived is not asked for again"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_a_damaged_download_leaves_no_file(
    client: Any, server: Any, reply: Any, job_object: JobObject, tmp_path: Path
) -> None:
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    artifact_routes(server, reply, {"model.safetensors": b"wrong"}, sha="0" * 64)
    with pytest.raises(OctrainError, match="damaged"):
        client.jobs.get("job_1").download("model", tmp_path / "m")
    assert list((tmp_path / "m").iterdir()) == []


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", ""])
def test_a_server_cannot_write_outside_the_folder(
    client: Any, server: Any, reply: Any, job_object: JobObject, tmp_path: Path, path: str
) -> None:
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    artifact_routes(server, reply, {path: b"x"})
    with pytest.raises(OctrainError, match="outside the artifact"):
        client.jobs.get("job_1").download("model", tmp_path / "m")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
