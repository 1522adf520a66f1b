"""Learning rates against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from fp8core.spec.training import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    WarmupStableDecaySchedule,
)
from fp8core.training.schedule import AnySchedule, learning_rate_factor


def factors(schedule: AnySchedule, total: int) -> list[float]:
    return [learning_rate_factor(schedule, step, total) for step in range(1, total + 1)]


def test_constant_with_warmup() -> None:
    schedule = ConstantSchedule(name="constant", warmup_steps=4)
    assert factors(schedule, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_its_final_ratio() -> None:
    schedule = LinearSchedule(name="linear", warmup_steps=2, final_lr_ratio=0.2)
    assert factors(schedule, 6) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_at_half_time() -> None:
    schedule = CosineSchedule(warmup_steps=2, final_lr_ratio=0.1)
    found = factors(schedule, 10)
    assert found[0] == 0.5
    assert found[1] == 1.0
    assert found[3] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert found[5] == pytest.approx(0.55)
    assert found[9] == pytest.approx(0.1)


def test_warmup_stable_decay_has_three_phases() -> None:
    schedule = WarmupStableDecaySchedule(
        name="warmup_stable_decay", warmup_steps=2, decay_steps=4, final_lr_ratio=0.0
    )
    assert factors(schedule, 8) == pytest.approx([0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])


def test_without_warmup_the_first_step_already_decays() -> None:
    schedule = LinearSchedule(name="linear", final_lr_ratio=0.0)
    assert factors(schedule, 4) == pytest.approx([0.75, 0.5, 0.25, 0.0])
