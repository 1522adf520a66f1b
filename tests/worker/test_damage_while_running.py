"""The disk damages what a supervisor keeps, while it runs or before its successor comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("killed", [False, True], ids=["supervisor", "successor"])
def test_a_damaged_spool_costs_its_own_records_and_nothing_else(
    workplace: Any, until: Callable[..., Any], killed: bool
) -> None:
    api = workplace.api
    attempt = api.add("att_damage", {"steps": 60, "step_seconds": 0.01})
    held = [True]
    route = api.handle

    def handle(path: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        if path.endswith("/telemetry") and held[0]:
            return 503, {"detail": "not now"}
        answer: tuple[int, Any] = route(path, body, headers)
        return answer

    api.handle = handle
    supervisor = workplace.supervise("att_damage")
    folder = workplace.folder("att_damage")
    until(lambda: (folder.work / "result.json").exists(), "the trainer's end", 30)
    beats = attempt.heartbeats
    until(lambda: attempt.heartbeats > beats + 5, "heartbeats after it")
    if killed:
        supervisor.kill()
        supervisor.wait()
    (segment,) = folder.spool.glob("*.jsonl")
    data = segment.read_bytes()
    begin = data.index(b'"step":30,')
    with segment.open("r+b") as file:
        file.seek(begin)
        file.write(b"\0" * 50)
    if killed:
        supervisor = workplace.supervise("att_damage")
    held[0] = False
    until(lambda: attempt.finished, "the end", 30)
    assert supervisor.wait(timeout=20) == 0, workplace.log()
    assert attempt.finished["outcome"] == "succeeded"
    told = [one for one in attempt.of_type("event") if one["kind"] == "spool_damaged"]
    assert len(told) == 1
    assert told[0]["data"]["bytes"] > 50
    lost = told[0]["data"]["records"]
    assert len(attempt.of_type("lost")) == lost - 1
    missing = set(range(1, 61)) - set(attempt.steps)
    assert len(missing) <= lost <= 2
    (kept,) = folder.damaged.iterdir()
    assert b"\0" * 50 in kept.read_bytes()
    assert not folder.spool.exists()
