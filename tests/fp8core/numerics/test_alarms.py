"""Alarms on FP8 scaling: what sets one off, and what does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fp8core.numerics.alarms import Alarm, FollowedScales, FP8Alarms

Observe = Callable[..., list[str]]


def watch(**fields: object) -> FP8Alarms:
    rules = {
        "amax_history_len": 4,
        "interval": 1,
        "margin": 0,
        "updates_per_step": 1,
        "backward_max": 57344.0,
    } | fields
    return FP8Alarms(FollowedScales(**rules))  # type: ignore[arg-type]


def figures(tensor: str = "input", **values: float) -> dict[str, float]:
    return {f"fp8/model.layers.0/up/{tensor}/{name}": value for name, value in values.items()}


def kinds(alarms: list[Alarm]) -> list[str]:
    return [alarm.kind for alarm in alarms]


def test_a_scale_that_stays_after_its_range_was_exceeded_is_frozen() -> None:
    alarms = watch()
    assert alarms.observe(10, figures(amax=448.0, scale=1.0)) == []
    assert alarms.observe(20, figures(amax=500.0, scale=1.0)) == []  # the update is yet to come
    found = alarms.observe(30, figures(amax=3.0, scale=1.0))
    assert [(a.kind, a.layer, a.tensor, a.step) for a in found] == [
        ("frozen_scale", "model.layers.0/up", "input", 30)
    ]
    assert found[0].message == (
        "model.layers.0/up input: the scale is still 1, 10 updates after an amax of 500 exceeded "
        "the 448 that it can hold"
    )
    assert alarms.observe(40, figures(amax=3.0, scale=1.0)) == []  # said once
    assert alarms.observe(50, figures(amax=3.0, scale=0.5)) == []  # it moved
    assert alarms.observe(60, figures(amax=1000.0, scale=0.5)) == []
    assert kinds(alarms.observe(70, figures(amax=1.0, scale=0.5))) == ["frozen_scale"]


def test_a_scale_that_follows_is_not_frozen() -> None:
    alarms = watch()
    amax, scale = 1.0, 1.0
    for step in range(1, 40):
        assert alarms.observe(step, figures(amax=amax, scale=scale)) == []
        scale = 448.0 / amax  # most recent
        amax *= 10.0 if step % 2 else 0.02


def test_the_interval_is_given_its_time() -> None:
    alarms = watch(interval=5, updates_per_step=2)
    alarms.observe(1, figures(amax=500.0, scale=1.0))
    assert alarms.observe(3, figures(amax=1.0, scale=1.0)) == []  # 4 updates later
    assert kinds(alarms.observe(4, figures(amax=1.0, scale=1.0))) == ["frozen_scale"]


@pytest.mark.parametrize("tensor", ["grad_output", "grad_qkv", "grad_probabilities"])
def test_each_tensor_has_the_range_of_its_format(tensor: str) -> None:
    alarms = watch(backward_max=57344.0)
    assert alarms.observe(1, figures(tensor, amax=500.0, scale=100.0)) == []
    assert alarms.observe(2, figures(tensor, amax=600.0, scale=100.0)) == []
    assert kinds(alarms.observe(3, figures(tensor, amax=1.0, scale=100.0))) == ["frozen_scale"]
    alarms = watch(backward_max=448.0)
    alarms.observe(1, figures("grad_output", amax=5.0, scale=100.0))
    assert kinds(alarms.observe(2, figures("grad_output", amax=1.0, scale=100.0))) == [
        "frozen_scale"
    ]


def test_a_scale_too_small_for_longer_than_the_history_is_frozen() -> None:
    alarms = watch(amax_history_len=16)
    # An outlier of 448 may hold the scale at 1 for as long as the history remembers it.
    for step in range(1, 18):
        assert alarms.observe(step, figures(amax=20.0, scale=1.0)) == []
    found = alarms.observe(18, figures(amax=20.0, scale=1.0))
    assert kinds(found) == ["frozen_scale"]
    assert "for 17 updates, longer than the history of 16, while the amaxes used 4.46%" in (
        found[0].message
    )


@pytest.mark.parametrize(
    ("amax", "margin"), [(448.0, 0), (30.0, 0), (0.0, 0), (448.0 / 4, 2), (448.0 / 64, 3)]
)
def test_a_scale_in_use_or_without_a_tensor_is_not_frozen(amax: float, margin: int) -> None:
    """A weight that does not move, a module that sees zeros: the scale rightly stays."""
    alarms = watch(margin=margin)
    for step in range(1, 50):
        assert alarms.observe(step, figures(amax=amax, scale=1.0)) == []


def test_an_infinity_in_the_history_is_told_as_long_as_it_sits_there() -> None:
    alarms = watch()
    assert alarms.observe(1, figures(amax=1.0, scale=448.0)) == []
    found = alarms.observe(2, figures(amax=1.0, scale=448.0, infinities=1.0))
    assert kinds(found) == ["infinite_amax"]
    assert "1 of the last 4 amaxes are infinite" in found[0].message
    assert alarms.observe(3, figures(amax=1.0, scale=448.0, infinities=1.0)) == []
    assert alarms.observe(4, figures(amax=1.0, scale=448.0)) == []
    found = alarms.observe(5, figures(amax=1.0, scale=448.0, infinities=2.0))
    assert kinds(found) == ["infinite_amax"]


def test_an_infinite_amax_that_froze_the_scale_is_both() -> None:
    alarms = watch()
    alarms.observe(1, figures(amax=math.inf, scale=448.0))
    found = alarms.observe(2, figures(amax=1.0, scale=448.0, infinities=1.0))
    assert kinds(found) == ["infinite_amax", "frozen_scale"]
    alarms = watch()
    for step in range(1, 4):  # NaN is no amax: the histories drop it
        assert alarms.observe(step, figures(amax=math.nan, scale=448.0)) == []


@pytest.mark.parametrize("rules", [None, watch()._scales])
def test_saturation_above_the_threshold(rules: FollowedScales | None) -> None:
    alarms = FP8Alarms(rules, saturation_threshold=0.25)
    assert alarms.observe(1, figures(amax=400.0, scale=1.0, saturated=0.25)) == []
    found = alarms.observe(2, figures(amax=400.0, scale=1.0, saturated=0.26))
    assert kinds(found) == ["saturation"]
    assert "26.00% of the elements" in found[0].message
    assert alarms.observe(3, figures(amax=400.0, scale=1.0, saturated=0.9)) == []
    assert alarms.observe(4, figures(amax=400.0, scale=1.0, saturated=0.0)) == []
    assert kinds(alarms.observe(5, figures(amax=400.0, scale=1.0, saturated=0.5))) == ["saturation"]


def test_scales_made_at_the_cast_cannot_freeze() -> None:
    alarms = FP8Alarms(None)
    for step in range(1, 50):
        assert alarms.observe(step, figures(amax=1e9, scale=1.0, infinities=3.0)) == []


def test_tensors_are_watched_apart() -> None:
    alarms = watch()
    alarms.observe(1, figures(amax=500.0, scale=1.0) | figures("weight", amax=1.0, scale=1.0))
    found = alarms.observe(2, figures(amax=1.0, scale=1.0) | figures("weight", amax=1.0, scale=1.0))
    assert [(alarm.tensor, alarm.kind) for alarm in found] == [("input", "frozen_scale")]
