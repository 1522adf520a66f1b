"""A job whose attention computes in FP8, from its spec to its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.training.attention_format import SHARE
from fp8core.training.outcome import RunResult

pytestmark = pytest.mark.gpu

Series = Callable[[Path, str], dict[int, float]]
# Heads of 128, which cuDNN has FP8 kernels for; each document in a row of its own.
RUN: dict[str, Any] = {
    "model": {
        "config": {
            "attention_dropout": 0.0,
            "hidden_size": 256,
            "intermediate_size": 512,
            "max_position_embeddings": 256,
        }
    },
    "data": {"source": "builtin", "packing": False},
    "conversion": {"small_gemm": "off"},
    "resources": {"device": "cuda"},
    "training": {"steps": 8, "batch_size": 2, "sequence_length": 256},
    "evaluation": {"every_steps": 4, "max_batches": 1},
    "checkpoint": {"every_steps": 4, "keep_best": 0, "keep_last": 2},
    "telemetry": {"log_every_steps": 1, "fp8_every_steps": 0},
}


def recipe(fp8_attention: bool) -> dict[str, Any]:
    return {"engine": "te", "amax_history_len": 4, "fp8_dpa": fp8_attention}


@pytest.fixture(autouse=True)
def _whatever_was_asked_for_before() -> Any:
    """Transformer Engine reads the wish for deterministic kernels, which is the process's."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=True)


def test_a_job_attends_in_fp8_and_goes_on_with_its_scales(
    job: Callable[..., Path],
    train_here: Callable[..., tuple[RunResult, Path]],
    series: Series,
    tmp_path: Path,
) -> None:
    _, plain = train_here(job(**RUN, recipe=recipe(False)))
    _, whole = train_here(job(**RUN, recipe=recipe(True)))
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000008")
    (resumed / "telemetry.jsonl").unlink()
    train_here(job(**RUN, recipe=recipe(True)), resumed)
    rows = json.loads((whole / "conversion.json").read_bytes())
    attention = [row for row in rows if row["name"].endswith("core_attention")]
    assert len(attention) == 2
    assert all(row["to"] and not row.get("reason") for row in attention)
    shares = series(whole, SHARE)
    assert set(shares.values()) == {1.0}
    assert len(shares) == RUN["training"]["steps"]
    found, expected = series(whole, "train/loss"), series(plain, "train/loss")
    assert found[8] < found[1]
    # The bound of the layers' own test; the first steps have scales of a short history.
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=0.05), step
    again = series(resumed, "train/loss")
    assert sorted(again) == [5, 6, 7, 8]
    for step, loss in again.items():
        assert loss == pytest.approx(found[step], rel=5e-3), step
