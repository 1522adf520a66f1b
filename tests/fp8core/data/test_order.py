"""The seeded order and the split."""

from __future__ import annotations

import numpy as np
import pytest

from fp8core.data.order import (
    EpochOrder,
    Groups,
    Purpose,
    hash_numbers,
    split_documents,
    uniform,
)


def splitmix64(state: int) -> int:
    """One output of SplitMix64 after its state was advanced, as published."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_reference_is_splitmix64() -> None:
    # The first outputs of the published generator for the seed 1234567.
    state, golden, mask = 1234567, 0x9E3779B97F4A7C15, (1 << 64) - 1
    outputs = []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + golden) & mask
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_hash_is_the_finaliser_applied_twice_with_keys() -> None:
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    first = splitmix64(42 ^ (2 * golden & mask))
    second = splitmix64(first ^ splitmix64(7))
    expected = [splitmix64(splitmix64(n ^ first) ^ second) for n in (0, 1, 2**40)]
    numbers = np.array([0, 1, 2**40], dtype=np.uint64)
    assert hash_numbers(42, Purpose.EPOCH, numbers, 7).tolist() == expected


def test_hashes_are_uniform_and_independent_of_the_order_of_numbers() -> None:
    values = uniform(hash_numbers(0, Purpose.SPLIT, np.arange(100_000, dtype=np.uint64)))
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    # 5000 expected in each, standard deviation 69.
    assert abs(counts - 5000).max() < 350
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_split_is_exact_disjoint_and_depends_on_the_seed() -> None:
    training, evaluation = split_documents(1000, 0.1, seed=3)
    assert len(evaluation) == 100
    assert sorted([*training.tolist(), *evaluation.tolist()]) == list(range(1000))
    assert training.tolist() == sorted(training.tolist())
    assert split_documents(1000, 0.1, seed=3)[1].tolist() == evaluation.tolist()
    assert split_documents(1000, 0.1, seed=4)[1].tolist() != evaluation.tolist()


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"), [(10, 0.02, 1), (2, 0.99, 1), (5, 0.0, 0), (7, 0.5, 4)]
)
def test_split_holds_out_at_least_one_and_leaves_one(
    count: int, fraction: float, held_out: int
) -> None:
    training, evaluation = split_documents(count, fraction, seed=0)
    assert (len(training), len(evaluation)) == (count - held_out, held_out)


def test_every_epoch_is_another_permutation_of_the_same_documents() -> None:
    documents = np.arange(0, 200, 2, dtype=np.uint32)
    order = EpochOrder(documents, seed=1, shuffle=True)
    epochs = [order.slice(100 * epoch, 100) for epoch in range(3)]
    assert all(sorted(epoch) == documents.tolist() for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    # Asked out of order and across the border of epochs, the answer is the same.
    assert order.slice(50, 150) == (epochs[0] + epochs[1])[50:200]
    assert order.slice(0, 100) == epochs[0]


def test_without_shuffling_the_order_is_that_of_the_data_and_epochs_end() -> None:
    order = EpochOrder(np.arange(3, dtype=np.uint32), seed=1, shuffle=False, epochs=2)
    assert order.slice(0, 100) == [0, 1, 2, 0, 1, 2]
    assert order.slice(5, 100) == [2]
    assert order.slice(6, 1) == []


def test_grouped_shuffle_reads_each_group_within_one_window() -> None:
    # 40 groups of 25 documents and 10 bytes; a window holds 4 groups.
    starts = np.arange(0, 1000, 25, dtype=np.int64)
    groups = Groups(starts, np.full(40, 10, dtype=np.int64), window_bytes=40)
    order = EpochOrder(np.arange(1000, dtype=np.uint32), seed=5, shuffle=True, groups=groups)
    sequence = order.slice(0, 1000)
    assert sorted(sequence) == list(range(1000))
    seen: set[int] = set()
    for window in range(10):
        part = {document // 25 for document in sequence[100 * window : 100 * (window + 1)]}
        assert len(part) == 4
        assert not part & seen
        seen |= part
    # Within a window documents of its groups are mixed, and another epoch has other windows.
    assert len({document // 25 for document in sequence[:12]}) > 1
    assert {d // 25 for d in order.slice(1000, 100)} != {d // 25 for d in sequence[:100]}


def test_one_window_is_a_full_shuffle() -> None:
    documents = np.arange(100, dtype=np.uint32)
    groups = Groups(np.array([0, 50]), np.array([10, 10]), window_bytes=1000)
    grouped = EpochOrder(documents, seed=5, shuffle=True, groups=groups)
    plain = EpochOrder(documents, seed=5, shuffle=True)
    assert grouped.slice(0, 100) == plain.slice(0, 100)
