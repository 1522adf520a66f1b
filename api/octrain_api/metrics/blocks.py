"""Blocks of points in memory: made of records or frames, joined, summed up by column."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from octrain_api.metrics.codec import (
    Band,
    Flags,
    Floats,
    Rows,
    pack_columns,
    unpack_band,
)

# Of each column: its least and greatest step, its newest value, and how many points it has.
STATS = np.dtype([("first", "<i8"), ("last", "<i8"), ("value", "<f8"), ("count", "<u4")])


@dataclass(frozen=True)
class Packed:
    """Columns as they are sent and stored."""

    names: tuple[str, ...]
    rows: Rows
    masked: bool
    bands: Sequence[Band]
    data: bytes


@dataclass(frozen=True)
class Block:
    """A matrix of S series and R rows, in the order of recording."""

    names: tuple[str, ...]
    rows: Rows
    # Shape (S, R), float64; what stands in an empty cell means nothing.
    values: Floats
    # Which cells are filled; None: all.
    present: Flags | None

    @property
    def points(self) -> int:
        """How many cells are filled."""
        if self.present is None:
            return int(self.values.size)
        return int(np.count_nonzero(self.present))

    def stats(self) -> bytes:
        """Of each column the STATS; a column without points has a count of 0."""
        out = np.zeros(len(self.names), dtype=STATS)
        steps = self.rows.steps
        if self.present is None:
            out["first"], out["last"], out["count"] = steps.min(), steps.max(), len(steps)
            out["value"] = self.values[:, -1]
            return out.tobytes()
        counts = self.present.sum(axis=1)
        newest = len(steps) - 1 - np.argmax(self.present[:, ::-1], axis=1)
        top = np.iinfo(np.int64).max
        out["first"] = np.where(self.present, steps, top).min(axis=1)
        out["last"] = np.where(self.present, steps, -1).max(axis=1)
        out["value"] = self.values[np.arange(len(counts)), newest]
        out["count"] = counts
        return out.tobytes()

    def pack(self) -> Packed:
        """Compress it."""
        bands, data = pack_columns(self.values, self.present)
        return Packed(self.names, self.rows, self.present is not None, bands, data)

    def after_row(self, first: int) -> "Block | None":
        """The rows from `first` on, without columns that are empty there; None if all are."""
        present = self.present[:, first:] if self.present is not None else None
        values = self.values[:, first:]
        names = self.names
        if present is not None:
            kept = present.any(axis=1)
            present, values = present[kept], values[kept]
            names = tuple(names[n] for n in np.flatnonzero(kept))
            if present.all():
                present = None
        if not values.size:
            return None
        return Block(names, self.rows[first:], values, present)


def unpack(packed: Packed) -> Block:
    """Decompress. Errors: Malformed."""
    values: list[Floats] = []
    present: list[Flags] = []
    begin = 0
    view = memoryview(packed.data)
    for band in packed.bands:
        part, filled = unpack_band(
            view[begin : begin + band.size], band.columns, len(packed.rows), packed.masked
        )
        begin += band.size
        values.append(part)
        if filled is not None:
            present.append(filled)
    return Block(
        packed.names,
        packed.rows,
        np.concatenate(values),
        np.concatenate(present) if present else None,
    )


def digest(names: Sequence[str]) -> bytes:
    """What tells one tuple of names from every other; no name holds a NUL."""
    return hashlib.sha256("\0".join(names).encode()).digest()


def join(blocks: Sequence[Block]) -> Block:
    """One block of all rows in their order, and of every name in any of them."""
    rows = Rows(
        np.concatenate([block.rows.steps for block in blocks]),
        np.concatenate([block.rows.seqs for block in blocks]),
        np.concatenate([block.rows.times for block in blocks]),
        np.concatenate([block.rows.tokens for block in blocks]),
    )
    first = blocks[0].names
    if all(block.names == first and block.present is None for block in blocks):
        values = np.concatenate([block.values for block in blocks], axis=1)
        return Block(first, rows, values, None)
    place = {name: n for n, name in enumerate(union(block.names for block in blocks))}
    values = np.zeros((len(place), len(rows)))
    present = np.zeros(values.shape, dtype=np.bool_)
    begin = 0
    for block in blocks:
        where = np.array([place[name] for name in block.names])
        part = slice(begin, begin + len(block.rows))
        values[where, part] = block.values
        present[where, part] = True if block.present is None else block.present
        begin += len(block.rows)
    return Block(tuple(place), rows, values, None if present.all() else present)


def union(groups: Iterable[Sequence[str]]) -> list[str]:
    """Every name once, in the order of its first appearance."""
    found: dict[str, None] = {}
    for names in groups:
        found.update(dict.fromkeys(names))
    return list(found)


@dataclass(frozen=True)
class Record:
    """What was recorded at one step, as a JSON record carries it."""

    step: int
    time: float
    tokens: int
    values: dict[str, float]


def of_records(records: Sequence[Record]) -> list[Block]:
    """Blocks of which no two share a name; their rows get the batch number 0."""
    component = components([tuple(record.values) for record in records])
    groups: dict[int, list[Record]] = {}
    for record, number in zip(records, component, strict=True):
        groups.setdefault(number, []).append(record)
    return [_of_group(group) for group in groups.values()]


def components(keys: Sequence[Collection[str]]) -> list[int]:
    """For each collection of names, hashable itself, a number; those with a name in common, or
    linked by others that have, get the same.
    """
    parent: list[int] = []
    known: dict[Collection[str], int] = {}
    owner: dict[str, int] = {}

    def root(number: int) -> int:
        while parent[number] != number:
            number = parent[number]
        return number

    for names in keys:
        if names in known:
            continue
        number = known[names] = len(parent)
        parent.append(number)
        for name in names:
            parent[root(number)] = root(owner.setdefault(name, number))
    return [root(known[names]) for names in keys]


def _of_group(records: Sequence[Record]) -> Block:
    names = union(list(record.values) for record in records)
    rows = Rows(
        np.array([r.step for r in records], dtype=np.int64),
        np.zeros(len(records), dtype=np.int64),
        np.array([r.time for r in records], dtype=np.float64),
        np.array([r.tokens for r in records], dtype=np.int64),
    )
    present = np.array([[name in r.values for r in records] for name in names])
    values = np.array([[r.values.get(name, 0.0) for r in records] for name in names])
    return Block(tuple(names), rows, values, None if present.all() else present)
