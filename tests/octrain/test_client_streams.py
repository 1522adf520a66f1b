"""Live events and logs: each once, whatever breaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octrain.client import (
    Client,
    LogFilter,
    ServerUnreachable,
)
from octrain.client.http import BlockingExchange

JobObject = Callable[..., dict[str, Any]]


def test_a_broken_stream_goes_on_after_the_last_event(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    events = [
        (1, "status", {"status": "running"}),
        (2, "metrics", {"step": 1, "values": {"train/loss": 3.0}}),
        (3, "progress", {"step": 2, "total_steps": 2}),
        (4, "end", {"status": "succeeded"}),
    ]

    def stream(request: Any) -> Any:
        last = int(request.headers.get("last-event-id", 0))
        blocks = [
            f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
            for number, kind, data in events
            if number > last
        ]
        text = ": hello\n\n" + "".join(blocks)
        # The first connection breaks in the middle of event 3.
        cut = text.index("event: progress") + 20 if last == 0 else None
        return reply(text.encode(), content_type="text/event-stream", cut=cut)

    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    server.routes["GET /v1/jobs/job_1/stream"] = stream
    seen = list(client.jobs.get("job_1").stream())
    assert [(event.id, event.type) for event in seen] == [(n, kind) for n, kind, _ in events]
    assert seen[1].data["values"] == {"train/loss": 3.0}
    assert [r.headers.get("last-event-id") for r in server.requests[1:]] == [None, "2"]


def test_an_aged_connection_is_opened_again_at_its_place(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    parts = {
        None: 'id: 7\nevent: status\ndata: {}\n\nevent: reconnect\ndata: {"after": "9"}\n\n',
        "9": 'event: gap\ndata: {"after": "9", "until": "20"}\n\nevent: end\ndata: {}\n\n',
    }
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    server.routes["GET /v1/jobs/job_1/stream"] = lambda r: reply(
        parts[r.headers.get("last-event-id")].encode(), content_type="text/event-stream"
    )
    seen = list(client.jobs.get("job_1").stream(include=["status", "metrics"], metrics=["a/*"]))
    assert [event.type for event in seen] == ["status", "gap", "end"]
    assert server.requests[-1].query == {"include": "status,metrics", "metrics": "a/*"}


def test_ids_of_the_stream_of_all_jobs_are_kept_as_they_are(
    client: Any, server: Any, reply: Any
) -> None:
    text = b'id: 12:job_1:3\nevent: status\ndata: {"job_id": "job_1"}\n\n'
    server.routes["GET /v1/events/stream"] = lambda r: reply(text, content_type="text/event-stream")
    events = client.events(after="11")
    assert [next(events).id, next(events).id] == ["12:job_1:3"] * 2
    assert [r.headers["last-event-id"] for r in server.requests] == ["11", "12:job_1:3"]


def test_logs_are_followed_until_the_end_and_each_line_once(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    lines: list[dict[str, Any]] = [
        {"seq": n, "text": f"line {n}", "stream": "stdout", "level": "error" if n % 2 else None}
        for n in range(1, 7)
    ]

    def logs(request: Any) -> Any:
        after = int(request.query["after"])
        found = [line for line in lines[:4] if line["seq"] > after and line["level"]]
        return reply({"lines": found, "next_after": 4})

    def stream(request: Any) -> Any:
        # The stream begins before the lines that were read, and breaks off once.
        first, last = (3, 5) if request.headers["last-event-id"] == "2" else (5, 6)
        blocks = [
            f"id: {line['seq']}\nevent: log\ndata: {json.dumps(line)}\n\n"
            for line in lines[first - 1 : last]
        ]
        end = "event: end\ndata: {}\n\n" if last == 6 else ""
        return reply(("".join(blocks) + end).encode(), content_type="text/event-stream")

    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object(last_event=2))
    server.routes["GET /v1/jobs/job_1/logs"] = logs
    server.routes["GET /v1/jobs/job_1/stream"] = stream
    wanted = LogFilter(levels=["error"], text="LINE")
    seen = [line.seq for line in client.jobs.get("job_1").follow_logs(wanted=wanted)]
    assert seen == [1, 3, 5]
    asked = [r.query for r in server.requests if r.path.endswith("/logs")]
    assert asked[0] == {"level": "error", "text": "LINE", "after": "0", "limit": "1000"}
    assert [r.query for r in server.requests if r.path.endswith("/stream")] == [
        {"include": "logs"}
    ] * 2


def test_the_last_lines_and_a_saved_log(
    client: Any, server: Any, reply: Any, job_object: JobObject, tmp_path: Path
) -> None:
    def logs(request: Any) -> Any:
        page = {"tail": ([9, 10], 8), "before": ([7], None)}
        numbers, before = page["tail" if "tail" in request.query else "before"]
        lines = [{"seq": n, "text": f"{n}"} for n in numbers]
        return reply({"lines": lines, "next_after": 10, "next_before": before})

    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    server.routes["GET /v1/jobs/job_1/logs"] = logs
    server.routes["GET /v1/jobs/job_1/logs/download"] = lambda r: reply(
        b"a\nb\n", content_type="text/plain"
    )
    job = client.jobs.get("job_1")
    assert [line.seq for line in job.logs(tail=3)] == [7, 9, 10]
    saved = job.save_log(tmp_path / "all.log", LogFilter(rank=2))
    assert saved.read_bytes() == b"a\nb\n"
    assert server.requests[-1].query == {"rank": "2"}
    assert list(tmp_path.iterdir()) == [saved]


def test_a_server_that_never_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(self: Any, seconds: float) -> None:
        raise AssertionError("it waits for a server that nobody has seen")

    monkeypatch.setattr(BlockingExchange, "sleep", sleep)
    with Client("http://127.0.0.1:1", "k") as client, pytest.raises(ServerUnreachable):
        next(client.events())
