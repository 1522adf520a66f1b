"""The bars of a job that is followed in a terminal."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from octrain.cli.watch import JobBars

JobObject = Callable[..., dict[str, Any]]


def test_a_terminal_shows_loss_speed_and_time_left(
    client: Any, server: Any, reply: Any, job_object: JobObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, height=20, color_system=None)
    events = [
        ("status", {"status": "running"}),
        ("metrics", {"values": {"train/loss": 2.125, "perf/tokens_per_second": 1234.4}}),
        ("progress", {"step": 4, "total_steps": 10, "eta_seconds": 754}),
        ("end", {"status": "succeeded"}),
    ]
    stream = "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in events)
    asked: list[Any] = []

    def job(request: Any) -> Any:
        asked.append(request)
        if len(asked) == 1:
            return reply(job_object(name="[bold]", status="queued", last_event=17))
        # The screen is drawn ten times a second: the job's end is told when it has been.
        limit = time.monotonic() + 60
        while "left" not in screen.getvalue() and time.monotonic() < limit:
            time.sleep(0.02)
        return reply(job_object(status="succeeded", is_final=True))

    server.routes["GET /v1/jobs/job_1"] = job
    server.routes["GET /v1/jobs/job_1/stream"] = lambda r: reply(
        stream.encode(), content_type="text/event-stream"
    )
    with JobBars(console) as bars:
        assert bars.watch(client.jobs.get("job_1")).status == "succeeded"
    shown = screen.getvalue()
    for words in ("[bold]", "4/10", "running, loss 2.125, 1,234 tokens/s, 12m34s left"):
        assert words in shown
    # Neither its past nor its logs and its layers' health, which can be a thousand times that.
    followed = next(r for r in server.requests if r.path.endswith("/stream"))
    assert followed.headers["last-event-id"] == "17"
    assert followed.query["include"] == "status,metrics"
    assert followed.query["metrics"] == "train/loss,eval/loss,perf/tokens_per_second"
