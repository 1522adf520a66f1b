"""What a checkpoint rests on is told before it: the next attempt may begin there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("killed", [False, True], ids=["supervisor", "successor"])
def test_a_checkpoint_is_registered_after_its_steps(
    workplace: Any, until: Callable[..., Any], killed: bool
) -> None:
    """Telemetry is not taken for a while, artifacts are; also where a successor tells it all."""
    api = workplace.api
    script = {"steps": 40, "checkpoint_every": 10, "step_seconds": 0.01}
    attempt = api.add("att_order", script)
    held, early = [True], []
    route = api.handle

    def handle(path: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        if path.endswith("/telemetry") and held[0]:
            return 503, {"detail": "not now"}
        if path.endswith("/artifacts") and body["kind"] == "checkpoint":
            told = {record["step"] for record in attempt.of_type("metrics")}
            if not set(range(1, body["step"] + 1)) <= told:
                early.append(body["name"])
        answer: tuple[int, Any] = route(path, body, headers)
        return answer

    api.handle = handle
    supervisor = workplace.supervise("att_order")
    work = workplace.folder("att_order").work
    until(lambda: (work / "result.json").exists(), "the trainer's end", 30)
    beats = attempt.heartbeats
    until(lambda: attempt.heartbeats > beats + 5, "heartbeats after it")
    assert [name for kind, name in attempt.artifacts if kind == "checkpoint"] == []
    if killed:
        supervisor.kill()
        supervisor.wait()
        supervisor = workplace.supervise("att_order")
        beats = attempt.heartbeats
        until(lambda: attempt.heartbeats > beats + 5, "the successor's heartbeats")
    held[0] = False
    until(lambda: attempt.finished, "the end", 30)
    assert supervisor.wait(timeout=20) == 0, workplace.log()
    assert early == []
    assert ("checkpoint", "step-00000040") in attempt.artifacts
    assert attempt.steps == list(range(1, 41))
