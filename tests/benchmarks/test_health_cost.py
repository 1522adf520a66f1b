"""What a recorded step costs is found in times that drift and jitter, and a case trains for it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from tests.benchmarks.programs import BENCHMARKS, run

PLAIN = 0.1
COUNT = 20


@pytest.fixture
def health_cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import health_cost

    return health_cost


def times(recorded: Iterable[int], steps: int, cost: dict[int, float]) -> dict[int, float]:
    """When steps of 100 ms are told that take 30 % longer at the end than at the beginning, 5 ms of
    jitter in each; ``cost``: what a recorded step adds to the steps at these places from it."""
    draw = random.Random(1)
    lengths = {
        step: PLAIN * (1 + 0.3 * step / steps) + abs(draw.gauss(0, 0.005))
        for step in range(1, steps + 1)
    }
    for step in recorded:
        for place, seconds in cost.items():
            lengths[step + place] += seconds
    told, now = {}, 1000.0
    for step, length in lengths.items():
        now += length
        told[step] = now
    return told


def found(health_cost: Any, cost: dict[int, float]) -> Any:
    groups = health_cost.groups_of(COUNT)
    recorded = set().union(*(group.recorded() for group in groups))
    steps = health_cost.WARM_UP + 3 * health_cost.WINDOW * COUNT + health_cost.BEHIND
    return health_cost.windows(times(recorded, steps, cost), groups)


def test_cost_is_found_wherever_it_falls(health_cost: Any, capsys: Any) -> None:
    # Half a step's worth of drift within the whole, and jitter as large as what is looked for.
    windows = found(health_cost, {-1: 0.001, 0: 0.003, 1: 0.001})
    of_four = health_cost.estimate(health_cost.of_four, windows)
    assert of_four.value == pytest.approx(5, abs=1.5)
    assert of_four.lowest < 5 < of_four.highest
    assert of_four.lowest <= of_four.low <= of_four.value <= of_four.high <= of_four.highest
    adds = health_cost.estimate(health_cost.share(health_cost.of_four), windows)
    assert adds.value == pytest.approx(0.5 / 1.15, abs=0.15)
    assert health_cost.judged("a case", windows, 2)
    assert not health_cost.judged("a case", windows, 0.3)
    said = capsys.readouterr().out
    assert "by the steps recorded four in a row: below 2 %" in said
    assert "by the steps recorded four in a row: NOT below 0.3 %" in said


def test_nothing_is_found_where_nothing_is(health_cost: Any) -> None:
    of_four = health_cost.estimate(health_cost.of_four, found(health_cost, {}))
    assert of_four.lowest < 0 < of_four.highest
    assert abs(of_four.value) < 1.5


def test_steps_recorded_alone_judge_where_they_cost_more(health_cost: Any, capsys: Any) -> None:
    windows = [
        health_cost.Times(plain=0.6, alone=0.6 + extra, four=0.6 + 4 * 0.003)
        for extra in (0.024, 0.025, 0.026)
    ]
    assert not health_cost.judged("a case", windows, 2)
    assert "by the steps recorded alone: NOT below 2 %" in capsys.readouterr().out


def test_recorded_steps_are_within_their_windows(health_cost: Any) -> None:
    groups = health_cost.groups_of(COUNT)
    orders = {tuple(sorted(group.starts, key=group.starts.get)) for group in groups}
    assert len(orders) > 1  # drawn
    starts = sorted(start for group in groups for start in group.starts.values())
    assert starts == [health_cost.WARM_UP + 1 + 6 * number for number in range(3 * COUNT)]
    assert max(health_cost.WARMING) < health_cost.WARM_UP
    for places in groups[0].starts:
        # The step before and the one behind bear what a recorded one costs, too.
        assert all(0 < place < health_cost.WINDOW - 1 for place in places)


def test_case_trains() -> None:
    ended = run("health_cost.py", "--dry-run", "--groups", "2", "--at-most", "1000")
    assert len(ended.values(r"tiny x 1 emulated: ([\d.]+) ms a plain step, of 2 groups")) == 1
    assert "below 1000 %" in ended.said
