"""Random generators go on where they were."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from fp8core.training import random_state


def draw() -> tuple[float, float, float, list[float], list[float]]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        np.random.random(700).tolist(),
        torch.randn(5).tolist(),
    )


def test_a_restored_state_draws_the_same_numbers() -> None:
    random_state.seed_everything(3)
    draw()
    saved = json.loads(json.dumps(random_state.capture()))
    wanted = [draw(), draw()]
    random_state.seed_everything(4)
    assert draw() != wanted[0]
    random_state.restore(saved)
    assert [draw(), draw()] == wanted


def test_the_seed_decides() -> None:
    random_state.seed_everything(5)
    first = draw()
    random_state.seed_everything(5)
    assert draw() == first
    assert torch.are_deterministic_algorithms_enabled()
