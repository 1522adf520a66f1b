"""Random generators go on where they were."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from fp8core.training import random_state

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, list[float], list[float]]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        np.random.random(700).tolist(),
        torch.randn(5).tolist(),
    )


def test_a_restored_state_draws_the_same_numbers() -> None:
    random_state.seed_everything(3, CPU)
    draw()
    saved = json.loads(json.dumps(random_state.capture()))
    wanted = [draw(), draw()]
    random_state.seed_everything(4, CPU)
    assert draw() != wanted[0]
    random_state.restore(saved)
    assert [draw(), draw()] == wanted


def test_the_seed_decides() -> None:
    random_state.seed_everything(5, CPU)
    first = draw()
    random_state.seed_everything(5, CPU)
    assert draw() == first


def test_deterministic_kernels_are_asked_for_on_a_cpu_alone() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        random_state.seed_everything(5, torch.device("cuda"))
        assert not torch.are_deterministic_algorithms_enabled()
        random_state.seed_everything(5, CPU)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)
