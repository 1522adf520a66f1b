"""TensorBoard files: what is in them, over several runs of a workdir."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fp8core.spec import Outcome
from fp8core.telemetry import read_records
from fp8core.telemetry.sinks import launch
from tests.fp8core.sinks.runs import SPEC, artifacts, run, spec_with


def test_tensorboard_reads_back_what_was_recorded(tmp_path: Path) -> None:
    run(spec_with(tensorboard=True), tmp_path / "w", range(1, 6))
    found = EventAccumulator(str(tmp_path / "w" / "tensorboard")).Reload()
    assert sorted(found.Tags()["scalars"]) == ["fp8/layer.0/input/amax", "train/loss", "train/lr"]
    losses = found.Scalars("train/loss")
    assert [point.step for point in losses] == [1, 2, 3, 4, 5]
    assert losses[0].value == 1.0
    assert math.isnan(losses[1].value)
    assert losses[4].value == pytest.approx(0.2)
    assert [(p.step, p.value) for p in found.Scalars("fp8/layer.0/input/amax")] == [
        (2, 2.0),
        (4, 4.0),
    ]
    recorded = [r for r, _ in read_records(tmp_path / "w" / "telemetry.jsonl")]
    assert losses[0].wall_time == pytest.approx(recorded[0]["time"], abs=1e-3)
    assert artifacts(tmp_path / "w") == [("telemetry", "tensorboard", 5)]


def test_a_resumed_run_goes_on_and_hides_the_steps_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stop leaves a sink two seconds, and a busy machine takes as long to start one.
    monkeypatch.setitem(launch._PATIENCE_SECONDS, Outcome.STOPPED, 60.0)
    workdir, spec = tmp_path / "w", spec_with(tensorboard=True)
    run(spec, workdir, range(1, 8), Outcome.STOPPED)
    run(spec, workdir, range(4, 10))
    found = EventAccumulator(str(workdir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [point.step for point in found.Scalars("train/loss")] == list(range(1, 10))
    assert len(list((workdir / "tensorboard").iterdir())) == 2


def test_a_sink_that_is_switched_on_later_gets_all_of_it(tmp_path: Path) -> None:
    workdir = tmp_path / "w"
    run(spec_with(), workdir, range(1, 4))
    assert not (workdir / "sinks").exists()
    run(spec_with(tensorboard=True), workdir, range(4, 6))
    found = EventAccumulator(str(workdir / "tensorboard")).Reload()
    assert [point.step for point in found.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_training_from_the_command_line_writes_event_files(tmp_path: Path) -> None:
    from fp8core.commands.train import run_train

    model = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    spec = SPEC | {
        "model": {"source": "config", "config": model},
        "training": {"steps": 3, "batch_size": 2, "sequence_length": 32},
        "evaluation": {"fraction": 0.0},
        "checkpoint": {"final": False},
        "resources": {"device": "cpu"},
        "telemetry": {"tensorboard": True},
    }
    path, workdir = tmp_path / "spec.json", tmp_path / "w"
    path.write_text(json.dumps(spec))
    assert run_train(path, workdir, []) == 0
    found = EventAccumulator(str(workdir / "tensorboard")).Reload()
    assert [point.step for point in found.Scalars("train/loss")] == [1, 2, 3]
    assert ("telemetry", "tensorboard", 3) in artifacts(workdir)
