"""Benchmarks of layers, steps and runs do on a CPU, tiny, what they do on a GPU."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from tests.benchmarks.programs import BENCHMARKS, Ended, run


def test_layers(tmp_path: Path) -> None:
    run("gemm_crossover.py", "--dry-run", "--out", str(tmp_path / "layers.json"))
    columns_are_there(tmp_path / "layers.json", ("bf16", "bf16_host", "emulated"))


@pytest.mark.slow
def test_layers_as_graphs(tmp_path: Path) -> None:
    words = ("gemm_crossover.py", "--dry-run", "--out", str(tmp_path / "layers.json"))
    run(*words)
    run(*words, "--graphed")
    columns_are_there(tmp_path / "layers.json", ("bf16", "bf16_graphed", "emulated_graphed"))


def columns_are_there(table: Path, columns: tuple[str, ...]) -> None:
    rows = json.loads(table.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"linear", "norm_linear", "norm_mlp"}
    for row in rows:
        assert all(row[column] > 0 for column in columns), row


def test_graphed_steps(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    ended = run("graphed_step.py", "--dry-run", "--out", str(out))
    lines = [json.loads(line) for line in ended.said.splitlines() if line.startswith("{")]
    steps, jobs = lines[:2], lines[2:]
    assert [row["row"] for row in steps] == ["amp", "te_packed"]
    for row in steps:
        # Nothing differs where the same is computed twice.
        assert row["eager_again"]["same"]
        assert row["graphed"]["same"]
        assert all(last < first for first, last in row["losses"])
    assert [(row["job"], row["asked"]) for row in jobs] == [("tiny:te", "off"), ("tiny:te", "auto")]
    assert all(row["milliseconds"] > 0 for row in jobs)
    for row, kind in zip(json.loads(out.read_text()), ("bf16", "fp8"), strict=True):
        for course, share in row["of_floor"].items():
            assert share == row["floor"][kind] / row[f"{course}_milliseconds"]
            told = rf"{row['row']}: .*{course} at (\d+)% of the floor.*; fp8 [\d.]+ ms, bf16 "
            assert ended.values(told) == [round(100 * share)]


def test_quality(tmp_path: Path) -> None:
    words = ("quality.py", str(tmp_path), "--dry-run", "--rows", "bf16,delayed", "--steps", "4")
    ended = run(*words)
    losses = ended.values(r"\| (?:bf16|delayed) \| ([\d.]+) \|")
    assert len(losses) == 2
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    rows = [line for line in ended.said.splitlines() if line.startswith("| ")]
    again = run(*words, "--table")
    assert [line for line in again.said.splitlines() if line.startswith("| ")] == rows


def test_quality_of_several_seeds(tmp_path: Path) -> None:
    words = ("quality.py", str(tmp_path), "--dry-run", "--steps", "4")
    ended = run(*words, "--rows", "bf16,bf16_again", "--seeds", "0,2")
    files = {path.stem for path in tmp_path.iterdir()}
    assert files == {
        f"dry-4-{row}{seed}" for row in ("bf16", "bf16_again") for seed in ("", "_seed2")
    }
    last = ended.said.split("\n\n")[-1]
    # Other weights and other text, and on a CPU the same bits once more.
    first, other = re.findall(r"\| bf16 \| 0, 2 \| ([\d.]+), ([\d.]+) \|", last)[0]
    assert first != other
    assert "| bf16 | +0.0000, +0.0000 | +0.0000 | +0.0000, +0.0000 |" in last
    assert "0.5 is no seed" in run(*words, "--seeds", "0,0.5", code=2).errors.replace("'", "")


def test_quality_beside_the_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from quality import SHAPES

    words = ("quality.py", str(tmp_path), "--dry-run", "--steps", "4")
    alone = run(*words, "--rows", "floor")
    alone.values(r"floor: fp8 ([\d.]+) ms, bf16 ([\d.]+) ms")
    file = tmp_path / "dry-floor-2x64.json"
    assert list(tmp_path.iterdir()) == [file]
    measured = json.loads(file.read_text())
    timed = run(*words, "--rows", "floor,bf16,delayed", "--timed-steps", "5")
    # What was measured is not measured again.
    assert json.loads(file.read_text()) == measured
    assert "floor:" not in timed.said
    for row, kind in (("bf16", "bf16"), ("delayed", "fp8")):
        found = json.loads((tmp_path / f"dry-timed-{row}.json").read_text())
        # The floor is of the model that is trained.
        assert (found["parameters"], found["batch"]) == (SHAPES["dry"].parameters, [2, 64])
        milliseconds = 1000 * statistics.median(found["seconds"][1:])
        share = f"{measured['floor'][kind] / milliseconds:.0%}"
        assert f" | {milliseconds:.1f} | {share} | " in line_of(row, timed)
    assert "| ms a step | of the floor | tokens/s |" in timed.said
    file.write_text(json.dumps({**measured, "device": "another"}))
    elsewhere = run(*words, "--table")
    assert "| ms a step | tokens/s |" in elsewhere.said
    assert "%" not in elsewhere.said


def line_of(row: str, ended: Ended) -> str:
    """That of ``row`` in the table."""
    (line,) = (line for line in ended.said.splitlines() if line.startswith(f"| {row} |"))
    return line


def test_batches_made_ahead() -> None:
    words = ("--hidden", "64", "--layers", "1", "--steps", "28", "--turns", "1", "--length", "64")
    ended = run("prefetch.py", *words)
    for what in ("a batch alone", "a step, batch made in it", "a step, batches made ahead"):
        ended.values(rf"{what} +([\d.]+) ms mean of")


def test_saves() -> None:
    ended = run("saving.py", "--hidden", "64", "--layers", "1", "--saves", "1", "--every", "1")
    assert len(ended.values(r"blocked, written .*?([\d.]+) ms median of 1")) == 2


def test_records() -> None:
    ended = run("telemetry.py", "--steps", "5", "--step-seconds", "0.01")
    assert len(ended.values(r"on cpu: median +([\d.]+) us")) == 3


@pytest.mark.slow
def test_adapters() -> None:
    words = ("--small", "--engines", "amp", "--layers", "1", "--steps", "1", "--length", "64")
    ended = run("adapter_steps.py", *words, "--targets", "qv")
    assert len(ended.values(r"amp +qv +fuse (?:none|auto) +([\d,]+) tokens/s")) == 2
    assert len(ended.values(r"amp +qv +fuse (?:none|auto) +(\d+)% of the floor")) == 2


@pytest.mark.slow
def test_adapters_beside_a_base_in_fp8() -> None:
    words = ("--small", "--engines", "te,amp", "--layers", "1", "--steps", "1", "--length", "64")
    ended = run("adapter_steps.py", *words, "--targets", "qv")
    rows = ended.values(r"te +qv +fuse (?:none|auto) .* loss ([\d.]+) .* base in (?:bf16|fp8), at")
    assert len(rows) == 4
    assert not re.search("amp .* base in fp8", ended.said)


@pytest.mark.slow
def test_encoders() -> None:
    words = ("--small", "--engines", "amp", "--dropouts", "0", "--rows", "2", "--length", "64")
    ended = run("encoder_steps.py", *words, "--steps", "1")
    assert len(ended.values(r"amp +fuse (?:none|auto) dropout 0: +([\d,]+) tok/s")) == 2
    assert len(ended.values(r"amp +fuse (?:none|auto) dropout 0: (\d+)% of the floor")) == 2


@pytest.mark.slow
def test_emulated_steps() -> None:
    sizes = ("--hidden", "32", "--layers", "1", "--batch", "1", "--length", "32")
    ended = run("emulated_step.py", *sizes, "--vocabulary", "64", "--steps", "2", "--threads", "1")
    assert len(ended.values(r" ([\d.]+) x fp32 +loss ([\d.]+)")) == 8


@pytest.mark.slow
def test_estimates() -> None:
    ended = run("plan_memory.py", "--dry", "--only", "125M")
    assert len(ended.values(r"125M (?:te|bf16) +estimate ([\d.]+) GiB")) == 2


@pytest.mark.slow
def test_faults_of_a_peer() -> None:
    ended = run("peers/accelerate_faults.py", "--only", "1")
    assert "octrain: 1 right" in ended.said
