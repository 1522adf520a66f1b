"""Runs that record a few steps with sinks, and what is to be seen of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8core.spec import JobSpec, Outcome, parse_spec
from fp8core.telemetry import TelemetryWriter, read_records
from fp8core.telemetry.sinks import Sinks

SPEC: dict[str, Any] = {
    "name": "small",
    "model": {"source": "config", "config": {"model_type": "llama"}},
    "data": {"source": "builtin"},
    "recipe": {"engine": "amp"},
}


def spec_with(**sinks: Any) -> JobSpec:
    return parse_spec(SPEC | {"telemetry": sinks})


def events(workdir: Path, kind: str) -> list[dict[str, Any]]:
    found = [record for record, _ in read_records(workdir / "telemetry.jsonl")]
    return [record for record in found if record["type"] == "event" and record["kind"] == kind]


def artifacts(workdir: Path) -> list[tuple[str, str, int]]:
    found = [record for record, _ in read_records(workdir / "telemetry.jsonl")]
    return [(r["kind"], r["path"], r["step"]) for r in found if r["type"] == "artifact"]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run(spec: JobSpec, workdir: Path, steps: range, outcome: Outcome = Outcome.SUCCEEDED) -> None:
    """A run that records two figures a step, NaN at step 2, and FP8 health at even ones."""
    workdir.mkdir(exist_ok=True)
    with (
        TelemetryWriter(workdir / "telemetry.jsonl") as telemetry,
        Sinks(spec, workdir, telemetry) as sinks,
    ):
        if steps.start > 1:
            resumed = {"step": steps.start - 1}
            telemetry.event("resumed", "goes on from the checkpoint", resumed)
        for step in steps:
            loss = math.nan if step == 2 else 1.0 / step
            telemetry.record(step, {"train/loss": loss, "train/lr": 0.5})
            telemetry.progress(step, steps.stop, step, None)
            if step % 2 == 0:
                telemetry.record(step, {"fp8/layer.0/input/amax": float(step)}, health=True)
        sinks.outcome = outcome
