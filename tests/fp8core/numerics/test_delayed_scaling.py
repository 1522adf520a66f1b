"""Histories and scales against sequences worked out by hand; the arithmetic is in the comments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.numerics.current_scaling import current_scale
from fp8core.numerics.delayed_scaling import (
    AmaxHistories,
    AmaxHistory,
    DelayedScaling,
    delayed_scale,
)

CPU = torch.device("cpu")
FLOAT32_MAX = float(np.finfo(np.float32).max)


def histories(columns: int = 1, **changes: Any) -> AmaxHistories:
    parameters: dict[str, Any] = {
        "fp8_max": 448.0,
        "margin": 0,
        "amax_history_len": 4,
        "amax_compute_algo": "max",
        "interval": 1,
    }
    made = AmaxHistories(DelayedScaling(**(parameters | changes)), CPU)
    made.add(columns)
    return made


def scales_after(amaxes: list[float], **changes: Any) -> list[float]:
    """The scale after the update that follows each of ``amaxes``."""
    one = histories(**changes)
    scales = []
    for amax in amaxes:
        one.record(0, torch.tensor(amax))
        one.update()
        scales.append(one.scales.scale[0].item())
    return scales


@pytest.mark.parametrize(("algo", "scale"), [("max", 44.8), ("most_recent", 448 / 3)])
def test_one_update_of_a_full_history(algo: str, scale: float) -> None:
    # Row 0 is the staged 3. "max" looks at all four before the oldest, 10, goes: 448/10.
    one = histories(amax_compute_algo=algo)
    column = torch.tensor([[3.0], [10.0], [2.0], [5.0]])
    one.write(0, AmaxHistory(column, torch.ones(1), torch.zeros(1, dtype=torch.int64)))
    one.update()
    assert one.read(0, 1).amax_history[:, 0].tolist() == [0.0, 2.0, 5.0, 3.0]
    assert one.scales.scale[0].item() == np.float32(scale)


def test_max_sees_exactly_amax_history_len_steps() -> None:
    # Length 4: the 8 of step 2 counts in steps 2, 3, 4, 5. 448/2 = 224, 448/8 = 56, 448/1 = 448.
    assert scales_after([2, 8, 1, 1, 1, 1]) == [224, 56, 56, 56, 56, 448]
    # Length 2: it counts in steps 2 and 3.
    assert scales_after([2, 8, 1, 1], amax_history_len=2) == [224, 56, 56, 448]
    # Length 1: only in its own.
    assert scales_after([2, 8, 1, 1], amax_history_len=1) == [224, 56, 448, 448]


def test_most_recent_sees_one_step_whatever_the_length() -> None:
    for length in (1, 2, 4):
        scales = scales_after([2, 8, 1], amax_history_len=length, amax_compute_algo="most_recent")
        assert scales == [224, 56, 448]


def test_the_history_turns_as_a_ring_with_a_staging_row() -> None:
    one = histories(amax_history_len=3)
    seen = []
    for amax in (1.0, 2.0, 3.0):
        one.record(0, torch.tensor(amax))
        one.update()
        seen.append(one.read(0, 1).amax_history[:, 0].tolist())
    assert seen == [[0, 0, 1], [0, 1, 2], [0, 2, 3]]


def test_margin_takes_powers_of_two_off_the_scale() -> None:
    # 448 / 2^2 / 7 = 16; 448 / 2^0 / 7 = 64.
    assert scales_after([7.0], margin=2) == [16.0]
    assert scales_after([7.0], margin=0) == [64.0]


def test_the_gradients_format_sets_the_numerator() -> None:
    assert scales_after([7.0], fp8_max=57344.0) == [8192.0]  # 57344 / 7


def test_interval_holds_the_scale_but_turns_the_history() -> None:
    # Recomputed at updates 1, 4 and 7. History 2: update 4 sees max(16, 4) = 16: 448/16 = 28;
    # update 7 sees max(2, 1) = 2: 224.
    amaxes = [8.0, 2.0, 4.0, 16.0, 1.0, 1.0, 2.0]
    expected = [56.0, 56.0, 56.0, 28.0, 28.0, 28.0, 224.0]
    assert scales_after(amaxes, interval=3, amax_history_len=2) == expected
    one = histories(interval=3, amax_history_len=3)
    for amax in amaxes[:3]:
        one.record(0, torch.tensor(amax))
        one.update()
    assert one.read(0, 1).amax_history[:, 0].tolist() == [0.0, 2.0, 4.0]


def test_several_casts_of_a_step_stage_the_largest() -> None:
    one = histories()
    for amax in (2.0, 8.0, 4.0):
        one.record(0, torch.tensor(amax))
    one.update()
    assert one.read(0, 1).amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 8.0]
    assert one.scales.scale[0].item() == 56.0


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_tensor_that_was_not_cast_is_left_as_it_is(algo: str) -> None:
    # Column 1 is cast once, column 0 in every step. After [8, 1] "max" gives 448/8 = 56 with the
    # history [0, 0, 8, 1]; not cast, it keeps both, although the 8 would have aged in time.
    two = histories(columns=2, amax_compute_algo=algo)
    for amax in (8.0, 1.0):
        two.record(0, torch.tensor(amax))
        two.record(1, torch.tensor(amax))
        two.update()
    before = two.read(1, 1)
    for _ in range(5):
        two.record(0, torch.tensor(1.0))
        two.update()
    after = two.read(1, 1)
    assert after.amax_history[:, 0].tolist() == [0.0, 0.0, 8.0, 1.0]
    assert after.scale.item() == before.scale.item() == (56.0 if algo == "max" else 448.0)
    assert two.scales.scale[0].item() == 448.0


def test_zeros_count_as_not_cast() -> None:
    # A tensor of zeros has amax 0, which the update cannot tell from no cast at all.
    assert scales_after([8.0, 0.0, 0.0, 0.0, 0.0, 1.0]) == [56.0] * 6
    assert scales_after([0.0]) == [1.0]


def test_infinity_freezes_the_scale_until_it_leaves_the_history() -> None:
    # Length 3: inf counts in steps 2, 3, 4; step 5 sees [2, 2, 2]: 448/2 = 224.
    assert scales_after([8.0, math.inf, 2.0, 2.0, 2.0], amax_history_len=3) == [
        56.0,
        56.0,
        56.0,
        56.0,
        224.0,
    ]
    recent = scales_after([8.0, math.inf, 2.0], amax_compute_algo="most_recent")
    assert recent == [56.0, 56.0, 224.0]


def test_nan_is_dropped() -> None:
    one = histories()
    for amax in (4.0, math.nan):
        one.record(0, torch.tensor(amax))
    one.update()
    assert one.scales.scale[0].item() == 112.0  # 448/4
    assert one.read(0, 1).amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 4.0]


def test_a_scale_beyond_fp32_becomes_the_largest_fp32_number() -> None:
    # 448 / 1e-37 = 4.48e39 > 3.4e38.
    assert scales_after([1e-37]) == [FLOAT32_MAX]
    # The smallest subnormal as well, and the inverse stays a number.
    one = histories()
    one.record(0, torch.tensor(1e-45))
    one.update()
    assert one.scales.scale[0].item() == FLOAT32_MAX
    assert 0 < one.scales.inverse[0].item() < 3e-39


@settings(max_examples=200, deadline=None)
@given(
    amax=st.floats(min_value=2.0**-118, max_value=2.0**120, width=32),
    margin=st.integers(min_value=0, max_value=6),
)
def test_the_scale_is_one_fp32_division(amax: float, margin: int) -> None:
    expected = np.float32(448.0 * 2.0**-margin) / np.float32(amax)
    scale = delayed_scale(torch.tensor(amax), torch.tensor(1.0), 448.0 * 2.0**-margin)
    assert scale.item() == expected
    one = histories(margin=margin)
    one.record(0, torch.tensor(amax))
    one.update()
    assert one.scales.inverse[0].item() == np.float32(1.0) / expected


def test_scales_read_before_an_update_keep_their_values() -> None:
    one = histories()
    before = one.scales
    one.record(0, torch.tensor(7.0))
    one.update()
    assert before.scale[0].item() == 1.0
    assert one.scales.scale[0].item() == 64.0
    assert one.scales.inverse[0].item() == 1 / 64


def test_columns_added_later_start_afresh_and_leave_the_others_alone() -> None:
    one = histories()
    one.record(0, torch.tensor(7.0))
    one.update()
    assert one.add(2) == 1
    one.record(0, torch.tensor(7.0))
    one.record(2, torch.tensor(14.0))
    one.update()
    assert [scale.item() for scale in one.scales.scale] == [64.0, 1.0, 32.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"amax_history_len": 0}, "amax_history_len"),
        ({"interval": 0}, "interval"),
        ({"margin": -1}, "margin"),
        ({"margin": 140}, "every scale would be zero"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo"),
    ],
)
def test_parameters_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        histories(**change)


@pytest.mark.parametrize(
    ("amax", "scale", "power_of_two"),
    [
        (7.0, 64.0, 64.0),  # 448/7
        (10.0, 44.8, 32.0),
        (448.0, 1.0, 1.0),
        (1000.0, 0.448, 0.25),
        (0.0, 1.0, 1.0),
        (math.inf, 1.0, 1.0),
        (math.nan, 1.0, 1.0),
        (1e-40, FLOAT32_MAX, 2.0**127),
    ],
)
def test_current_scale(amax: float, scale: float, power_of_two: float) -> None:
    tensor = torch.tensor(amax)
    assert current_scale(tensor, 448.0).item() == np.float32(scale)
    assert current_scale(tensor, 448.0, power_of_two=True).item() == power_of_two
