"""Runs whose fused blocks go back to high precision one after the other, by all kinds of parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.fusion.plain import PlainParts
from fp8core.training.stopping import StopRequest
from tests.fp8core.fusion import test_runs
from tests.fp8core.fusion.parts_by_gemm import Chosen, InSteps, norms_of_a_cpu
from tests.fp8core.fusion.test_runs import RUN, fusing
from tests.fp8core.training.conftest import job, series, train_here
from tests.fp8core.training.test_fused_fallback_gpu import assert_all_fell_back, break_mlps

__all__ = ["fusing", "job", "norms_of_a_cpu", "series", "train_here"]  # fixtures


@pytest.mark.parametrize("parts", [PlainParts, InSteps, Chosen])
def test_all_fall_back_where_one_block_was_not_enough(
    parts: type[PlainParts],
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_runs.FusingAmp, "block_parts", lambda self: parts())
    training = {**RUN["training"], "on_divergence": "fallback_bf16"}
    # A recipe whose specs may ask for this.
    spec = job(**{**RUN, "recipe": {"engine": "emulated"}, "training": training})
    stop, workdir = StopRequest(), tmp_path / "w"
    faulty = {"model.layers.0", "model.layers.1"}
    train_here(spec, workdir, plant=lambda a: break_mlps(a, faulty, stop, 4), stop=stop)
    stop.requested = False
    result, _ = train_here(spec, workdir, plant=lambda a: break_mlps(a, faulty, stop, None))
    assert result.step == 6
    assert_all_fell_back(workdir, series(workdir, "train/loss"))
