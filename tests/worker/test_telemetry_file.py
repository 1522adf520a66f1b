"""The trainer's telemetry file on the node's disk: bounded, with nothing lost that is needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fp8core.telemetry import TelemetryWriter
from fp8core.telemetry.sinks.process import _kept_from, _read
from octrain_worker.attempt_folder import AttemptFolder
from octrain_worker.supervisor import telemetry_file
from octrain_worker.supervisor.collector import Collector
from octrain_worker.supervisor.holes import punch_hole
from octrain_worker.supervisor.spool import Spool
from octrain_worker.supervisor.telemetry_file import TelemetryFile

LIMIT = 1 << 20
VALUES = {f"fp8/layers.{n}/weight/amax": n / 7 for n in range(60)}


class Run:
    """A trainer that records, and the supervisor's part that spools it and bounds the file."""

    def __init__(self, folder: Path, sinks: tuple[str, ...] = ()) -> None:
        self.folder = AttemptFolder(folder / "att_1")
        self.folder.create()
        self.path = self.folder.work / "telemetry.jsonl"
        self.writer = TelemetryWriter(self.path)
        self.spool = Spool(self.folder.spool)
        self.collector = Collector(self.spool, telemetry=self.path, logs={})
        self.file = TelemetryFile(self.folder, sinks, limit=LIMIT)
        self.step = 0
        self.spooled: list[dict[str, Any]] = []
        probe = folder / "probe"
        probe.write_bytes(bytes(8192))
        if not punch_hole(probe, 0, 4096):
            pytest.skip("this file system makes no holes")

    def train(self, steps: int, *, shorten: bool = True) -> None:
        """So many steps of about 3 KiB, a checkpoint every hundredth."""
        for _ in range(steps):
            self.step += 1
            self.writer.record(self.step, VALUES)
            self.writer.progress(self.step, 10**6, self.step, None)
            if self.step % 100 == 0:
                path = f"checkpoints/step-{self.step:08d}"
                self.writer.checkpoint(self.step, path, kind="periodic", best=False, metric=None)
            if self.step % 50 == 0:
                assert self.writer.flush(60)
                self.collect()
                if shorten:
                    self.shorten()

    def collect(self) -> None:
        self.spooled += self.collector.drain()
        self.spool.acknowledge(self.spool.last_seq)

    def shorten(self) -> None:
        self.file.shorten(self.spool.position("telemetry"))

    @property
    def taken(self) -> int:
        """Bytes of the disk."""
        return self.path.stat().st_blocks * 512

    def sink_is_at(self, kind: str, offset: int) -> None:
        folder = self.folder.work / "sinks"
        folder.mkdir(exist_ok=True)
        (folder / f"{kind}.json").write_text(json.dumps({"offset": offset}))


def test_a_long_run_takes_no_more_than_the_limit_and_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    highest = 0
    for _ in range(6):
        run.train(400)
        highest = max(highest, run.taken)
    size = run.path.stat().st_size
    assert size > 5 * LIMIT
    assert highest < 1.3 * LIMIT
    steps = [r["step"] for r in run.spooled if r["type"] == "metrics"]
    assert steps == list(range(1, 2401)), "each is in the spool once"
    # A new process of the trainer goes on with the numbers, and with whole lines.
    run.writer.close()
    with TelemetryWriter(run.path) as again:
        assert again.last_seq == 2 * 2400 + 24
        again.phase("training")
    assert run.path.stat().st_size > size
    run.collect()
    assert run.spooled[-1]["phase"] == "training"


def test_a_successor_finds_every_announcement_and_the_last_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1500)
    run.writer.artifact("model", "model", 1500)
    run.writer.close()
    records = [r for piece in TelemetryFile(run.folder).records() for r in piece]
    assert len(records) < 2 * 1500, "most have gone"
    found = {r["step"] for r in records if r["type"] == "checkpoint"}
    assert found == set(range(100, 1501, 100))
    assert [r["step"] for r in records if r["type"] == "progress"][-1] == 1500
    assert records[-1]["type"] == "artifact"


def test_what_is_not_spooled_stays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(400, shorten=False)
    position = run.spool.position("telemetry")
    for _ in range(3000):
        run.step += 1
        run.writer.record(run.step, VALUES)
    assert run.writer.flush(60)
    run.file.shorten(position)
    run.collect()
    steps = [r["step"] for r in run.spooled if r["type"] == "metrics"]
    assert steps == list(range(1, 3401))
    run.writer.close()


def test_a_sink_holds_up_what_it_has_not_sent_but_not_for_ever(tmp_path: Path) -> None:
    run = Run(tmp_path, ("mlflow", "tensorboard"))
    run.sink_is_at("tensorboard", 1 << 40)
    run.train(600)
    assert run.taken > 1.5 * LIMIT, "the server of MLflow has never answered"
    offset = run.path.stat().st_size // 2
    with run.path.open("rb") as file:
        file.seek(offset)
        offset += len(file.readline())
    run.sink_is_at("mlflow", offset)
    run.shorten()
    assert run.taken < run.path.stat().st_size - offset + 8192
    assert _kept_from(run.path, offset) == offset
    first = _read(run.path, offset)[0][0]
    # Then it stays where it is, and the limit is reached four times over.
    run.train(1800)
    assert run.taken < 4.2 * LIMIT
    begin = _kept_from(run.path, offset)
    assert begin > offset, "it is told that it has lost something"
    records, _, damaged = _read(run.path, begin)
    assert damaged == 0
    assert first["seq"] < records[0]["seq"]
    assert [r["seq"] for r in records] == list(
        range(records[0]["seq"], records[0]["seq"] + len(records))
    )
    run.writer.close()
    assert _kept_from(run.path, run.path.stat().st_size) == run.path.stat().st_size


def test_a_file_system_without_holes_keeps_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(telemetry_file, "punch_hole", lambda path, start, end: False)
    run.train(500)
    run.writer.close()
    with run.path.open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == run.path.stat().st_size


def test_an_hour_without_the_api_fits_the_spool_and_goes_whole_in_order(tmp_path: Path) -> None:
    """500 FP8 series every tenth step, losses and progress at each, ten steps a second: less than
    256 MiB for an hour. A tenth of the hour is spooled with nothing acknowledged, by two
    supervisors, the second of which takes over from one that died; then all of it is sent."""
    figures = ("amax", "scale", "saturated", "underflow")
    names = [
        f"fp8/model.layers.{layer}.mlp.down_proj/{tensor}/{figure}"
        for layer in range(42)
        for tensor in ("input", "weight", "grad_output")
        for figure in figures
    ][:500]
    path = tmp_path / "telemetry.jsonl"
    spool = Spool(tmp_path / "spool")
    collector = Collector(spool, telemetry=path, logs={})
    with TelemetryWriter(path) as writer:
        for step in range(3600):
            writer.record(step, {f"train/{n}": step / 7 + n for n in range(8)})
            writer.progress(step, 10**6, step * 4096, 1234.567)
            if step % 10 == 0:
                writer.record(step, dict.fromkeys(names, (step + 1) / 3), health=True)
                assert writer.flush(60)
            if step % 500 == 499:
                collector.drain()
            if step == 1800:  # neither closed nor told
                spool = Spool(tmp_path / "spool")
                collector = Collector(spool, telemetry=path, logs={})
        assert writer.flush(60)
        assert writer.dropped == 0
    collector.drain()
    taken = sum(file.stat().st_size for file in (tmp_path / "spool").iterdir())
    assert 10 * taken < 256 << 20
    assert spool.acknowledged_seq == 0

    sent: list[dict[str, Any]] = []
    while spool.acknowledged_seq < spool.last_seq:
        first, records = spool.read(spool.acknowledged_seq)
        assert first == len(sent) + 1, "numbered without a gap"
        sent += records
        spool.acknowledge(first + len(records) - 1)
    metrics = [record for record in sent if record["type"] == "metrics"]
    health = [record["step"] for record in metrics if len(record["values"]) == len(names)]
    assert health == list(range(0, 3600, 10))
    losses = [record["step"] for record in metrics if "train/0" in record["values"]]
    assert losses == list(range(3600))
    assert [r["step"] for r in sent if r["type"] == "progress"] == list(range(3600))
    left = sum(file.stat().st_size for file in (tmp_path / "spool").iterdir())
    assert left < 16 << 20, "what the API has goes"
