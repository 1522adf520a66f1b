"""Weights & Biases: an offline run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_wandb_offline_writes_a_run_that_reads_back(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    workdir = tmp_path / "w"
    run(spec_with(wandb={"project": "fp8"}), workdir, range(1, 5))
    assert events(workdir, "sink_failed") == []
    [(kind, path, _)] = artifacts(workdir)
    assert kind == "telemetry"
    assert not [file for file in (workdir / path).rglob("*") if file.is_symlink()]
    [file] = (workdir / path).glob("*.wandb")
    rows, project = [], ""
    for data in wandb_records(file):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            project = record.run.project
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({".".join([*i.nested_key] or [i.key]): i.value_json for i in items})
    assert project == "fp8"
    losses = {int(row["step"]): row["train/loss"] for row in rows if "train/loss" in row}
    assert sorted(losses) == [1, 2, 3, 4]
    assert float(losses[4]) == 0.25
