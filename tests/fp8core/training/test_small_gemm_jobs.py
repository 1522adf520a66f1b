"""The small-GEMM rule in a job: what its report says, and that it goes on as it began."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.conversion import SmallGemmRule
from fp8core.measured import layer_times
from tests.fp8core.planted_measurements import CARD, bf16_time, plant_layers


def test_on_a_cpu_it_does_not_apply(
    job: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    _, workdir = train_here(job(training={"steps": 1}, evaluation={"fraction": 0.0}))
    found = json.loads((workdir / "report.json").read_bytes())["conversion"]["small_gemm"]
    assert found["applied"] is False
    assert found["kept"] == 0
    assert "of the engine te, and this is emulated" in found["says"]


def test_a_job_goes_on_with_the_layers_that_it_kept(
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere, or later, other figures may be known; the engine's state is of those layers."""
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setattr("fp8core.measured.tables.FOLDER", folder)
    plant_layers(folder, lambda kind, *size: 2.0 * bf16_time(kind, *size))
    times = layer_times(CARD)
    assert times is not None
    rules: list[SmallGemmRule | str] = [SmallGemmRule(times, "delayed", 64), "figures are gone"]
    monkeypatch.setattr("fp8core.training.assemble.small_gemm_rule", lambda spec, card: rules[0])
    spec, kept = job(training={"steps": 2}, evaluation={"fraction": 0.0}), []

    def note(assembled: Any) -> None:
        report = assembled.conversion
        kept.append({row.name: row.reason for row in report.kept if "lm_head" not in row.name})

    _, workdir = train_here(spec, tmp_path / "work", plant=note)
    assert len(kept[0]) == 19, "all layers but the head"
    assert all("would slow the model down" in reason for reason in kept[0].values())
    said = json.loads((workdir / "report.json").read_bytes())["conversion"]["small_gemm"]
    assert (said["applied"], said["kept"], said["judged"], said["card"]) == (True, 14, 14, CARD)

    rules.reverse()
    (workdir / "report.json").unlink()
    train_here(spec, workdir, plant=note)
    assert kept[1] == kept[0]
    said = json.loads((workdir / "report.json").read_bytes())["conversion"]["small_gemm"]
    assert said["says"] == "14 Linear layers stay in bf16, as they did when the job began"
