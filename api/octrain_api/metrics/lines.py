"""Series out of what blocks hold of them: thousands at a time, in one pass over numpy's arrays.

Nothing here waits for anything, so a large answer is made in a thread of its own. Series that lie
in the same blocks, such as the health of all layers, are rows of one matrix.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from octrain_api.metrics import summary
from octrain_api.metrics.catalogue import Names
from octrain_api.metrics.codec import Directory, Flags, Floats, Integers, Rows, unpack_band
from octrain_api.metrics.lookup import BlockFacts
from octrain_api.metrics.rollups import BUCKET
from octrain_api.metrics.summary import STORED, Summary

__all__ = ["Key", "Line", "Part", "Query", "RawBlock", "lines_of"]

Key = tuple[str, str, int]
# Cells of a matrix of several series: bounds what their sums take.
_CELLS = 1 << 18


@dataclass(frozen=True)
class Query:
    """What is asked for. `since` gives for each job the batch number after which to begin."""

    names: Names
    attempt: int | None = None
    from_step: int = 0
    to_step: int | None = None
    since: dict[str, int] = field(default_factory=dict)
    # At most so many buckets; None for the points themselves.
    buckets: int | None = None
    # A series of at most so many points is given by its points all the same.
    max_points: int = 0


@dataclass(frozen=True)
class Line:
    """One series: its points, or its buckets where `width` says how wide they are."""

    job_id: str
    name: str
    attempt: int
    width: int
    # Of each bucket its first step; of each point its step. In order.
    steps: Any
    summary: Summary
    # Whether each element is one point.
    exact: bool

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(slots=True)
class Part:
    """What one block holds of one series."""

    key: Key
    block: BlockFacts
    column: int
    # Steps from here on are a newer attempt's.
    cut: int | None
    # Whether every step of the block counts.
    whole: bool
    # Its buckets: their level, what their rows share, and their data; None for its points.
    level: int | None = None
    row_data: bytes = b""
    data: bytes = b""


@dataclass(frozen=True)
class RawBlock:
    """What the rows of a block share, where its bands lie, and those that were read."""

    rows: Rows
    directory: Directory
    bands: dict[int, bytes] = field(default_factory=dict)


def lines_of(
    query: Query, parts: Sequence[Part], raw: Mapping[int, RawBlock], width: int
) -> list[Line]:
    """The series that have points, by job, name and attempt.

    The parts of a series come in the order of recording; `raw` has the blocks of those without a
    level. Buckets have this width, if buckets are asked for.
    """
    of_key: defaultdict[Key, list[Part]] = defaultdict(list)
    for part in parts:
        of_key[part.key].append(part)
    alike: defaultdict[Any, list[list[Part]]] = defaultdict(list)
    for own in of_key.values():
        alike[own[0].cut, tuple((part.block.id, part.level) for part in own)].append(own)
    lines: list[Line] = []
    for (cut, _), series in alike.items():
        for some in _chunks(series, query, raw, width):
            lines += _lines_of_matrix(some, _matrix(some, query, raw, cut), query, width)
    return sorted(lines, key=lambda line: (line.job_id, line.name, line.attempt))


def _chunks(
    series: list[list[Part]], query: Query, raw: Mapping[int, RawBlock], width: int
) -> Iterator[list[list[Part]]]:
    first = series[0]
    size = sum(
        len(raw[part.block.id].rows) if part.level is None else len(part.data) // STORED.itemsize
        for part in first
    )
    count = max(_CELLS // max(size, 1), 1)
    if any(
        part.level is not None and (query.buckets is None or part.level > width) for part in first
    ):
        # Buckets that are wider than asked for stand for points of each series' own steps.
        count = 1
    for start in range(0, len(series), count):
        yield series[start : start + count]


@dataclass(frozen=True)
class _Matrix:
    """Points or buckets of some series, which share the columns; a cell of no point counts none."""

    # Of each column a step that lies in it.
    steps: Integers
    cells: Summary
    # Whether all of them are points.
    exact: bool


def _matrix(
    series: list[list[Part]], query: Query, raw: Mapping[int, RawBlock], cut: int | None
) -> _Matrix:
    pieces: list[tuple[Integers, Summary]] = []
    exact = True
    place = 0
    for level, group in groupby(series[0], key=lambda part: part.level):
        run = range(place, place + sum(1 for _ in group))
        place = run.stop
        if level is None:
            pieces.append(_points(series, run, query, raw, cut))
        else:
            exact = False
            pieces.append(_buckets(series, run, query, level, cut))
    if len(pieces) == 1:
        return _Matrix(*pieces[0], exact)
    return _Matrix(
        np.concatenate([steps for steps, _ in pieces]),
        summary.concatenate([cells for _, cells in pieces]),
        exact,
    )


def _points(
    series: list[list[Part]],
    run: range,
    query: Query,
    raw: Mapping[int, RawBlock],
    cut: int | None,
) -> tuple[Integers, Summary]:
    """What neighbouring blocks hold as points, each a bucket of its own."""
    of_blocks = [[own[place] for own in series] for place in run]
    blocks = [raw[parts[0].block.id] for parts in of_blocks]
    cells = [_cells(block, parts) for block, parts in zip(blocks, of_blocks, strict=True)]
    rows = Rows(
        np.concatenate([block.rows.steps for block in blocks]),
        np.concatenate([block.rows.seqs for block in blocks]),
        np.concatenate([block.rows.times for block in blocks]),
        np.concatenate([block.rows.tokens for block in blocks]),
    )
    values = np.concatenate([of[0] for of in cells], axis=1)
    present = None
    if any(of[1] is not None for of in cells):
        filled = [np.ones(of[0].shape, np.bool_) if of[1] is None else of[1] for of in cells]
        present = np.concatenate(filled, axis=1)
    keep = rows.steps >= query.from_step
    if query.to_step is not None:
        keep &= rows.steps <= query.to_step
    if cut is not None:
        keep &= rows.steps < cut
    since = query.since.get(of_blocks[0][0].block.job_id, 0)
    if since:
        keep &= rows.seqs > since
    if present is not None:
        keep &= present.any(axis=0)
    if not keep.all():
        values, rows = values[:, keep], rows[keep]
        present = present[:, keep] if present is not None else None
    return rows.steps, summary.of_points(values, present, rows)


def _cells(block: RawBlock, parts: Sequence[Part]) -> tuple[Floats, Flags | None]:
    """The columns of some series in a block: values, and which are filled (None: all)."""
    columns = np.array([part.column for part in parts])
    masked = parts[0].block.masked
    count = len(block.rows)
    values = np.empty((len(parts), count))
    present = np.empty(values.shape, dtype=np.bool_) if masked else None
    bands = block.directory.bands_of(columns)
    for band in np.unique(bands).tolist():
        of_band = block.directory.columns(band)
        unpacked, filled = unpack_band(block.bands[band], len(of_band), count, masked)
        where = np.flatnonzero(bands == band)
        values[where] = unpacked[columns[where] - of_band.start]
        if present is not None and filled is not None:
            present[where] = filled[columns[where] - of_band.start]
    return values, present


def _buckets(
    series: list[list[Part]], run: range, query: Query, level: int, cut: int | None
) -> tuple[Integers, Summary]:
    """What neighbouring blocks hold as buckets.

    Only where the points are gone may a bucket be but partly in the range; it is then kept, and
    where a newer attempt begins in it, the older one's part as well.
    """
    first = series[0]
    rows = np.frombuffer(b"".join(first[place].row_data for place in run), dtype=BUCKET)
    data = b"".join(own[place].data for own in series for place in run)
    # The parts of one series lie after one another already.
    stored = np.frombuffer(data, dtype=STORED).reshape(len(series), -1)
    begin = rows["first"]
    keep = begin + level > query.from_step
    if query.to_step is not None:
        keep &= begin <= query.to_step
    if cut is not None:
        keep &= begin < cut
    keep &= (stored["count"] > 0).any(axis=0)
    if not keep.all():
        rows, stored, begin = rows[keep], stored[:, keep], begin[keep]
    return begin, summary.load(stored, begin, rows["time"], rows["tokens"])


def _lines_of_matrix(
    series: list[list[Part]], matrix: _Matrix, query: Query, width: int
) -> list[Line]:
    cells, exact = matrix.cells, matrix.exact
    counts = np.count_nonzero(cells.count, axis=1)
    keys = [own[0].key for own in series]
    lines = []
    if query.buckets is not None:
        summed = np.flatnonzero((counts > 0) & ~(exact & (counts <= query.max_points)))
        if len(summed):
            alone = len(series) == 1
            numbers = (cells.last_at[0] if alone else matrix.steps) // width
            some = cells if len(summed) == len(series) else cells.rows(summed)
            numbers, buckets = summary.sum_up(some, numbers)
            for n, own in enumerate(summed.tolist()):
                steps, of_one = _filled(numbers * width, buckets, n)
                lines.append(Line(*keys[own], width, steps, of_one, exact=False))
        rest = np.flatnonzero((counts > 0) & exact & (counts <= query.max_points))
    else:
        rest = np.flatnonzero(counts)
    for n in rest.tolist():
        steps, of_one = _filled(cells.last_at[n], cells, n)
        if len(steps) > 1 and np.any(steps[1:] < steps[:-1]):
            order = np.argsort(steps, kind="stable")
            steps, of_one = steps[order], of_one.take(order)
        lines.append(Line(*keys[n], 1, steps, of_one, exact))
    return lines


def _filled(steps: Integers, cells: Summary, which: int) -> tuple[Integers, Summary]:
    """One series of a matrix without its empty cells."""
    own = cells.rows(which)
    filled = own.count > 0
    return (steps, own) if filled.all() else (steps[filled], own.take(filled))
