"""On a GPU the floor is of what the GPU takes, however slowly the host launches it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.benchmarks.programs import BENCHMARKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LAUNCHING = 0.001
"""Seconds, far more than a tiny GEMM takes a GPU."""


def test_what_the_host_takes_to_launch_is_not_in_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from peers.floor import floor
    from peers.step_work import Attention, Product, StepWork

    multiply = torch._scaled_mm

    def slowly(*matrices: Any, **options: Any) -> Any:
        time.sleep(LAUNCHING)
        return multiply(*matrices, **options)

    monkeypatch.setattr(torch, "_scaled_mm", slowly)
    attention = Attention(1, 64, heads=2, kv_heads=2, head_dim=64, count=1, causal=True)
    step = StepWork((Product(128, 128, 128, count=1),), attention, updated_bytes=1)
    found = floor(step, torch.device("cuda"))
    assert 0 < found["gemms_fp8"] < 1000 * LAUNCHING / 2
