"""Blocks of more series than the places of a rollup can number."""

from __future__ import annotations

import numpy as np
import pytest

from octrain_api.metrics import codec, rollups, summary
from octrain_api.metrics.blocks import Block


def test_none_is_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place takes two bytes. The series that get none are in the coarsest level all the same."""
    monkeypatch.setattr(rollups, "LEVELS", (4, 16))
    monkeypatch.setattr(rollups, "MIN_DENSITY", 2)
    monkeypatch.setattr(rollups, "_COLUMNS", 8192)
    count, steps = 66_000, np.arange(16)
    rows = codec.Rows(steps, steps * 0 + 1, np.ones(16), steps)
    values = np.repeat(np.arange(float(count))[:, None], len(steps), axis=1)
    names = tuple(f"m{column}" for column in range(count))
    made = {one.level: one for one in rollups.roll_up(Block(names, rows, values, None))}
    assert sorted(made) == [4, 16]
    for level, rollup in made.items():
        shared = np.frombuffer(rollup.row_data, dtype=rollups.BUCKET)
        for column in (0, 5, 32_767, 32_768, 40_000, 65_541, count - 1):
            place = rollups.place_of(rollup.places, column)
            if place < 0:
                assert (level, column >= 32_768) == (4, True)
                continue
            offset, size = rollups.extent(place, rollup.buckets)
            data = rollup.data[offset : offset + size]
            found = summary.load(
                np.frombuffer(data, summary.STORED),
                shared["first"],
                shared["time"],
                shared["tokens"],
            )
            assert found.last.tolist() == [column] * rollup.buckets
