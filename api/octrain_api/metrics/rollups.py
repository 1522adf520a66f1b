"""The rollups of a block: its buckets at each level, for the series that are dense enough there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octrain_api.metrics import summary
from octrain_api.metrics.blocks import Block

# Widths of the buckets, in steps.
LEVELS = (64, 512, 4096)
# A series is in a level if its buckets there hold so many points each, on average: else reading
# the points themselves costs no more. The coarsest level has every series, for when they are gone.
MIN_DENSITY = 12
# Columns that are summed up together: bounds the memory.
_COLUMNS = 64
_PLACE = np.dtype("<i2")
# So many series have a place that such a number can name. The coarsest level needs none: it has all
# of them, in order.
_MOST_PLACES = 1 << 15
_WIDEST = 1 << 62
# Of each bucket its first step, and the time and tokens of its last row.
BUCKET = np.dtype([("first", "<i8"), ("time", "<f8"), ("tokens", "<i8")])


@dataclass(frozen=True)
class Rollup:
    """A row of the table."""

    level: int
    buckets: int
    row_data: bytes
    places: bytes | None
    data: bytes


def roll_up(block: Block) -> list[Rollup]:
    """The rollups of a block at every level."""
    parts: dict[int, list[bytes]] = {level: [] for level in LEVELS}
    places = {level: np.full(len(block.names), -1) for level in LEVELS}
    taken = dict.fromkeys(LEVELS, 0)
    counts = [len(np.unique(block.rows.steps // level)) for level in LEVELS]
    # A level of nearly as many buckets as the next is of no use beside that.
    useful = {
        level: count >= 2 * coarser
        for level, count, coarser in zip(LEVELS, counts, [*counts[1:], 0], strict=True)
    }
    for start in range(0, len(block.names), _COLUMNS):
        present = block.present[start : start + _COLUMNS] if block.present is not None else None
        values = block.values[start : start + _COLUMNS]
        buckets = summary.of_points(values, present, block.rows)
        keys, width = block.rows.steps, 1
        for level in LEVELS:
            keys, buckets = summary.sum_up(buckets, keys // (level // width))
            width = level
            dense = buckets.count.sum(axis=1) >= MIN_DENSITY * len(keys)
            dense &= useful[level]
            if level == LEVELS[-1]:
                chosen = np.arange(len(dense))
            else:
                chosen = np.flatnonzero(dense)[: _MOST_PLACES - taken[level]]
            if len(chosen):
                places[level][start + chosen] = taken[level] + np.arange(len(chosen))
                taken[level] += len(chosen)
                parts[level].append(summary.store(buckets.rows(chosen), keys, level))
    return [
        _rollup(block, level, places[level], b"".join(parts[level]))
        for level in LEVELS
        if taken[level]
    ]


def _rollup(block: Block, level: int, places: Any, data: bytes) -> Rollup:
    keys = block.rows.steps // level
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.append(keys[order][1:] != keys[order][:-1], True))
    last = order[ends]
    rows = np.zeros(len(last), dtype=BUCKET)
    rows["first"] = keys[last] * level
    rows["time"], rows["tokens"] = block.rows.times[last], block.rows.tokens[last]
    every = np.array_equal(places, np.arange(len(places)))
    stored = None if every else places.astype(_PLACE).tobytes()
    return Rollup(level, len(last), rows.tobytes(), stored, data)


def place_of(places: bytes | None, column: int) -> int:
    """Which place a column has in a rollup's data; -1 for none."""
    if places is None:
        return column
    return int(np.frombuffer(places, dtype=_PLACE)[column])


def extent(place: int, buckets: int) -> tuple[int, int]:
    """Offset and length of a series in a rollup's data, in bytes."""
    size = buckets * summary.STORED.itemsize
    return place * size, size


def level_for(width: int, levels: Sequence[int] | None = None) -> int | None:
    """The coarsest of the levels whose buckets make up buckets of this width; None for points."""
    fitting = [level for level in (LEVELS if levels is None else levels) if level <= width]
    return max(fitting) if fitting else None


def width_for(first: int, last: int, buckets: int) -> int:
    """The least power of two such that aligned buckets of it from one step to another are few.

    A width that 64 bits do not hold is not given: step 2**62, the last there is, is alone then.
    """
    width = 1
    while last // width - first // width >= buckets and width < _WIDEST:
        width *= 2
    return width
