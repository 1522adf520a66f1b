"""Weights & Biases: offline runs, read back from the files that `wandb sync` takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

from fp8core.spec import Outcome
from fp8core.telemetry import TelemetryWriter
from fp8core.telemetry.sinks import Sinks
from tests.fp8core.sinks.runs import artifacts, events, run, spec_with


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format after a header of seven bytes."""
    data, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # what is too short for a header ends the block
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or last
            yield record
            record = b""


def kinds(folder: Path) -> dict[str, list[Any]]:
    """All records of an offline run, by their kind."""
    [file] = folder.glob("*.wandb")
    found: dict[str, list[Any]] = {}
    for data in wandb_records(file):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def values(folder: Path, metric: str) -> dict[int, float]:
    """What was logged of a metric, by its step; each step at most once."""
    found = {}
    for history in kinds(folder)["history"]:
        row = {".".join([*i.nested_key] or [i.key]): i.value_json for i in history.item}
        if metric in row:
            step = json.loads(row["step"])
            assert step not in found, f"step {step} twice"
            found[step] = float(json.loads(row[metric]))
    return found


def test_wandb_offline_writes_runs_that_read_back(tmp_path: Path) -> None:
    """Two trainings in one workdir, as a stop and its resumption are."""
    workdir, spec = tmp_path / "w", spec_with(wandb={"project": "fp8"})
    run(spec, workdir, range(1, 5), Outcome.STOPPED)
    run(spec, workdir, range(4, 9))
    assert events(workdir, "sink_failed") == []
    offline = sorted({path for kind, path, _ in artifacts(workdir) if kind == "telemetry"})
    first, second = (workdir / path for path in offline)
    for folder in (first, second):  # an artifact takes no links
        assert not [file for file in folder.rglob("*") if file.is_symlink()]

    begun = [kinds(folder)["run"][0] for folder in (first, second)]
    assert [one.project for one in begun] == ["fp8", "fp8"]
    assert [one.display_name for one in begun] == ["small", "small"]
    assert begun[0].run_id == begun[1].run_id, "for `wandb sync` they are one run"
    config = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
    assert config["training"]["optimizer"]["lr"] == 0.0003
    assert config["recipe"]["engine"] == "amp"

    losses = values(first, "train/loss")
    assert math.isnan(losses.pop(2))
    assert losses == {1: 1.0, 3: 1 / 3, 4: 0.25}
    assert values(second, "train/loss") == {step: 1.0 / step for step in range(4, 9)}
    assert values(second, "fp8/layer.0/input/amax") == {4: 4.0, 6: 6.0, 8: 8.0}
    assert kinds(second)["exit"][0].exit_code == 0


def test_wandb_keeps_infinities_and_tells_of_a_failure(tmp_path: Path) -> None:
    odd = {"odd/infinity": math.inf, "odd/minus_infinity": -math.inf, "odd/least": 5e-324}
    spec = spec_with(wandb={})
    with (
        TelemetryWriter(tmp_path / "telemetry.jsonl") as telemetry,
        Sinks(spec, tmp_path, telemetry),
    ):
        telemetry.record(3, odd)
    [folder] = (tmp_path / "wandb").glob("**/offline-run-*")
    assert {name: values(folder, name) for name in odd} == {
        name: {3: value} for name, value in odd.items()
    }
    assert kinds(folder)["exit"][0].exit_code == 1
