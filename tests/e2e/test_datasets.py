"""An uploaded data set: in parts, over a connection that is cut, and trained on."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from octrain.client import DatasetInvalid, OctrainError

pytestmark = pytest.mark.e2e


def _cut(service, dataset_id: str, offset: int, content: bytes, sent: int) -> None:
    """Begin to send a part, and hang up when the server has begun to write it down."""
    place = urlsplit(service.stack.url)
    head = (
        f"PATCH /v1/datasets/{dataset_id}/content HTTP/1.1\r\nHost: {place.netloc}\r\n"
        f"Authorization: Bearer {service.stack.api_key}\r\nUpload-Offset: {offset}\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(head.encode() + content[:sent])
        drafts = f"{dataset_id}/parts/.*"
        service.until(
            lambda: any(draft.stat().st_size >= 2**20 for draft in _files(service, drafts)),
            "a block of the part is on the disk",
        )


def _files(service, pattern: str) -> list[Path]:
    return list(service.stack.data_dir.rglob(pattern))


def _command(service, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HOME": str(service.stack.data_dir),
        "OCTRAIN_API_URL": service.stack.url,
        "OCTRAIN_API_KEY": service.stack.api_key,
    }
    return subprocess.run(
        [sys.executable, "-m", "octrain", "datasets", *arguments],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_three_parts_with_a_cut_between_and_a_job_that_trains_on_them(service, tmp_path):
    content = "".join(
        json.dumps({"body": f"line {n} of a text that says {n * 7 % 13} again"}) + "\n"
        for n in range(60_000)
    ).encode()
    file = tmp_path / "lines.jsonl"
    file.write_bytes(content)
    announced = {
        "name": "lines.jsonl",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "media": "jsonl",
        "columns": {"text": "body"},
    }
    made = service.http.post("/v1/datasets", json=announced)
    assert made.status_code == 201, made.text
    dataset_id = made.json()["id"]
    headers = {"Content-Type": "application/octet-stream", "Upload-Offset": "0"}
    first = service.http.patch(
        f"/v1/datasets/{dataset_id}/content", content=content[:500_000], headers=headers
    )
    assert first.status_code == 204, first.text
    _cut(service, dataset_id, 500_000, content[500_000:], 1_500_000)

    def arrived() -> int:
        return int(service.http.get(f"/v1/datasets/{dataset_id}").json()["received"])

    service.until(lambda: arrived() > 500_000, "what came before the cut is stored")
    early = service.http.post(
        "/v1/jobs", json=service.spec(data={"source": "upload", "dataset": dataset_id})
    )
    assert early.json()["errors"][0]["code"] == "not_ready"

    steps: list[tuple[int, int]] = []
    dataset = service.client.datasets.upload(
        file, columns={"text": "body"}, progress=lambda done, size: steps.append((done, size))
    )
    assert (dataset.id, dataset.status, dataset.rows) == (dataset_id, "ready", 60_000)
    assert 500_000 + 2**20 <= steps[0][0] <= 2_000_000
    assert steps[-1] == (len(content), len(content))
    again = service.client.datasets.upload(file, columns={"text": "body"})
    assert again.id == dataset_id, "nothing is sent twice"

    job = service.submit(
        "from-upload",
        data={"source": "upload", "dataset": dataset.id, "columns": {"text": "body"}},
    )
    assert job.data.spec["data"]["sha256"] == announced["sha256"]
    service.end(job)
    assert job.data.latest_metrics["train/loss"] > 0
    events = [event["kind"] for event in service.events(job.id)]
    assert "artifact" in events

    shown = json.loads(_command(service, "show", dataset.id, "--json").stdout)
    assert (shown["id"], shown["sha256"]) == (dataset.id, announced["sha256"])
    listed = json.loads(_command(service, "ls", "--json").stdout)
    assert dataset.id in [one["id"] for one in listed]
    removed = _command(service, "rm", dataset.id)
    assert removed.returncode == 0, removed.stderr
    with pytest.raises(OctrainError, match="no data set"):
        service.client.datasets.get(dataset.id)
    service.until(
        lambda: not _files(service, f"{dataset.id}/*"), "the controller removes its files"
    )


def test_a_bad_file_is_refused_with_its_lines(service, tmp_path):
    file = tmp_path / "chats.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    file.write_text(f'{good}\n{{"messages": []}}\nnot json\n')
    with pytest.raises(DatasetInvalid) as refused:
        service.client.datasets.upload(file, format="chat")
    assert [problem.line for problem in refused.value.dataset.problems] == [2, 3]
    assert "line 3: not JSON" in str(refused.value)
    answer = _command(service, "upload", str(file), "--format", "chat", "--json")
    assert answer.returncode == 2
    assert "line 2" in answer.stderr
    with pytest.raises(OctrainError, match="suffix"):
        service.client.datasets.upload(__file__)
