"""The rows of the training benchmark build and step on a CPU, and its verdicts are right."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.programs import BENCHMARKS, run

# Each is compiled for half a minute.
COMPILED = ("compiled", "compiled_blocks", "torchao", "torchao_blocks")


@pytest.fixture
def train_peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import train_peers

    return train_peers


def test_rows_run_in_turn_each_in_its_process(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    rows = "floor,fused_head,bf16"
    command = ("train_peers.py", "--dry-run", "--rows", rows, "--out", str(out))
    ended = run(*command, "--at-least", "fused_head=1,fused_head=0.0001*bf16")
    found = json.loads(out.read_text())
    assert found["shape"] == "tiny"
    assert [row["row"] for row in found["rows"]] == rows.split(",")
    for row in found["rows"][1:]:
        assert row["tokens_per_second"] > 0
        assert row["peak_gib"] is None
        first, _, last = row["losses"]
        # It knows nothing of 512 tokens, and learns.
        assert first == pytest.approx(math.log(512), rel=0.1)
        assert last < first
    assert "| Octrain te, fused, head in FP8 |" in ended.said
    assert ended.said.count(": reached, ") == 2
    ended.values(r"floor: fp8 ([\d.]+) ms, bf16 ([\d.]+) ms")


def test_every_row_steps_on_a_cpu(tmp_path: Path, train_peers: Any) -> None:
    rows = [
        row
        for row in train_peers.ROW_NAMES
        if row not in (train_peers.FLOOR, *train_peers.ON_A_GPU_ONLY, *COMPILED)
    ]
    assert len(rows) == 20
    measured(tmp_path / "rows.json", rows)


@pytest.mark.slow
def test_every_compiled_row_steps_on_a_cpu(tmp_path: Path) -> None:
    measured(tmp_path / "rows.json", COMPILED)


def measured(out: Path, rows: Any) -> None:
    """By `crossover`, which has them all in one process."""
    ended = run("crossover.py", "--dry-run", "--rows", ",".join(rows), "--out", str(out))
    found = json.loads(out.read_text())["rows"]
    assert {row["row"] for row in found} == set(rows)
    assert all(row["tokens_per_second"] > 0 for row in found)
    assert "| size | parameters | best in bf16, tokens/s |" in ended.said


@pytest.mark.slow
def test_a_row_that_fails_is_told_and_the_others_run() -> None:
    ended = run("crossover.py", "--dry-run", "--rows", "fused_fp8_attention,bf16", code=1)
    assert "tiny fused_fp8_attention failed" in ended.said
    assert '"row": "bf16"' in ended.said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rows", "fused,fused_haed"), "fused_haed is no row; there are floor, fused, "),
        (("--rows", "accelerate", "--dry-run"), "accelerate needs a GPU"),
        (("--shape", "4b"), "invalid choice: '4b'"),
        (("--dry-run", "--profile"), "--profile looks at a GPU"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: tuple[str, ...], says: str) -> None:
    assert says in run("train_peers.py", *words, code=2).errors


def test_names_of_rows_are_those_that_are_built(train_peers: Any) -> None:
    from peers.training_rows import ROWS

    assert {*ROWS, train_peers.FLOOR} == set(train_peers.ROW_NAMES)
    assert ROWS.keys() > train_peers.IN_BF16
    assert set(train_peers.ROW_NAMES) > train_peers.ON_A_GPU_ONLY


def test_targets_count_less_their_spread(train_peers: Any) -> None:
    speeds = {"fused": (100, 110, 120), "bf16": (50,), "plain": ()}
    results: list[dict[str, Any]] = [{"row": "plain", "error": "it failed"}]
    for row, values in speeds.items():
        results += [{"row": row, "tokens_per_second": value} for value in values]
    asked = "fused=100,fused=101,fused=2*bf16,fused=2.1*bf16,plain=1,fused=1*plain"
    said = train_peers.judged(results, asked)
    told = [line.partition(": ")[2].partition(",")[0] for line in said]
    assert told == ["reached", "MISSED", "reached", "MISSED", "not known", "not known"]


def test_measured_tables_are_printed() -> None:
    ended = run("crossover.py", "--table", "fp8core/measured/nvidia-h200.models.json")
    assert "| 8b | 8,030,261,248 |" in ended.said
    assert len(ended.values(r"\| (\d\.\d\d) \|")) >= 4
