"""Which document comes when: seeded, and the same on every machine and version of numpy.

Everything rests on one hash of (seed, purpose, number), so that no generator has a state to save:
the split and the order of any epoch can be computed again from the spec alone. The hash is the
SplitMix64 finaliser (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014),
which is a bijection of 64-bit words, so sorting by it has no ties.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EpochOrder",
    "Groups",
    "Numbers",
    "Purpose",
    "hash_numbers",
    "split_documents",
    "uniform",
]

Numbers = NDArray[np.unsignedinteger[Any]]
"""Document numbers: uint32 where they fit, else uint64."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a hash is for; different purposes of one seed are independent of each other."""

    SPLIT = 1
    EPOCH = 2
    GROUPS = 3
    MASK_CHOICE = 4
    MASK_ACTION = 5
    MASK_TOKEN = 6


@dataclass(frozen=True)
class Groups:
    """Runs of documents that are read together (the row groups of Parquet files).

    ``starts`` holds the first document of every group, ascending from 0, ``bytes`` the size of
    each in memory. ``window_bytes`` is how much may be held at once.
    """

    starts: NDArray[np.int64]
    bytes: NDArray[np.int64]
    window_bytes: int


def hash_numbers(
    seed: int, purpose: Purpose, numbers: Numbers, stream: int = 0
) -> NDArray[np.uint64]:
    """64 pseudo-random bits for every number; distinct numbers give distinct hashes.

    ``stream`` tells apart uses of one purpose, such as epochs.
    """
    first = _finalise((seed & _MASK) ^ (int(purpose) * _GOLDEN & _MASK))
    second = _finalise(first ^ _finalise(stream & _MASK))
    mixed = _finalise_array(numbers.astype(np.uint64, copy=False) ^ np.uint64(first))
    return _finalise_array(mixed ^ np.uint64(second))


def uniform(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Hashes as numbers in [0, 1), from their upper 53 bits."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def split_documents(count: int, fraction: float, seed: int) -> tuple[Numbers, Numbers]:
    """Document numbers for training and for evaluation, both ascending and disjoint.

    ``round(fraction * count)`` documents, at least one, go to evaluation: those with the smallest
    hashes. None with a fraction of 0. Needs at least two documents otherwise.
    """
    numbers: Numbers = np.arange(count, dtype=np.uint32 if count < 2**32 else np.uint64)
    if fraction <= 0:
        return numbers, numbers[:0]
    if count < 2:
        raise ValueError("one document cannot be split")
    held_out = min(max(1, round(fraction * count)), count - 1)
    hashes = hash_numbers(seed, Purpose.SPLIT, numbers)
    chosen = np.zeros(count, dtype=bool)
    chosen[np.argpartition(hashes, held_out - 1)[:held_out]] = True
    return numbers[~chosen], numbers[chosen]


class EpochOrder:
    """The endless sequence of documents: one permutation of ``documents`` after another.

    Position p is document ``p % n`` of epoch ``p // n``; with ``epochs`` the sequence ends. Only
    the permutation of one epoch is held (4 bytes a document). With ``groups`` the shuffle has two
    levels, as reading single rows of a compressed file at random would unpack a whole group for
    each: the groups are shuffled and cut into windows of ``window_bytes``, then the documents
    within every window. Data of one window or less gets a full shuffle.
    """

    def __init__(
        self,
        documents: Numbers,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None = None,
        groups: Groups | None = None,
    ) -> None:
        self._documents = documents
        self._seed = seed
        self._shuffle = shuffle
        self._groups = groups
        self._epoch = -1
        self._order = documents
        self.length: int | None = None if epochs is None else epochs * len(documents)

    @property
    def documents_per_epoch(self) -> int:
        return len(self._documents)

    def slice(self, position: int, count: int) -> list[int]:
        """Up to ``count`` documents from ``position`` on; fewer only at the end of all epochs."""
        end = position + count if self.length is None else min(position + count, self.length)
        size = len(self._documents)
        found: list[int] = []
        while position < end and size:
            epoch, start = divmod(position, size)
            stop = min(size, start + end - position)
            found.extend(self._of_epoch(epoch)[start:stop].tolist())
            position += stop - start
        return found

    def _of_epoch(self, epoch: int) -> Numbers:
        if not self._shuffle:
            return self._documents
        if epoch != self._epoch:
            self._order = self._documents[self._permutation(epoch)]
            self._epoch = epoch
        return self._order

    def _permutation(self, epoch: int) -> NDArray[np.intp]:
        hashes = hash_numbers(self._seed, Purpose.EPOCH, self._documents, epoch)
        if self._groups is None or len(self._groups.starts) < 2:
            return np.argsort(hashes)
        groups = self._groups
        numbers = np.arange(len(groups.starts), dtype=np.uint64)
        shuffled = np.argsort(hash_numbers(self._seed, Purpose.GROUPS, numbers, epoch))
        ends = np.cumsum(groups.bytes[shuffled])
        window_of_group = np.empty(len(shuffled), dtype=np.int64)
        window_of_group[shuffled] = (ends - groups.bytes[shuffled]) // max(1, groups.window_bytes)
        group_of_document = np.searchsorted(groups.starts, self._documents, side="right") - 1
        return np.lexsort((hashes, window_of_group[group_of_document]))


def _finalise(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _finalise_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Unsigned arithmetic of arrays wraps, as the hash wants it.
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
