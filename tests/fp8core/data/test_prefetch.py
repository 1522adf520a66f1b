"""Batches made ahead: the same as without, with the place of what was taken."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fp8core.data import Batch, open_dataset
from fp8core.data.prefetch import PrefetchedBatches
from fp8core.training import random_state
from tests.fp8core.data.documents import BYTES, KINDS, Spec, same, tokenizer_for
from tests.fp8core.data.numbered import (
    CPU,
    PATIENCE,
    TOKENS,
    Numbered,
    no_thread_is_left,
    number_of,
    threads,
)

__all__ = ["no_thread_is_left"]  # a fixture


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "packing", "task"), KINDS)
def test_it_gives_the_same_batches_and_places_to_the_end_of_all_epochs(
    corpus_spec: Spec, kind: str, packing: bool | None, task: str, rank: int
) -> None:
    spec = corpus_spec(kind, packing=packing, task=task, data={"epochs": 3})
    options: dict[str, Any] = {"rank": rank, "world": 2}
    plain = open_dataset(spec, tokenizer_for(task), **options).train
    source = open_dataset(spec, tokenizer_for(task), **options).train
    with PrefetchedBatches(source, CPU) as ahead:
        assert ahead.state_dict() == plain.state_dict()
        taken = 0
        for expected in plain:
            assert same(next(ahead), expected)
            assert ahead.state_dict() == plain.state_dict()
            assert ahead.statistics == plain.statistics
            taken += 1
        assert taken > 20
        # The end is told again and again, and its place counts what was dropped before it.
        assert (next(ahead, None), next(ahead, None)) == (None, None)
        assert ahead.state_dict() == plain.state_dict()


def test_an_evaluation_between_two_batches_changes_neither(corpus_spec: Spec) -> None:
    spec = corpus_spec("prompt_completion", evaluation={"fraction": 0.2})
    plain, made = open_dataset(spec, BYTES), open_dataset(spec, BYTES)
    assert plain.evaluation is not None
    assert made.evaluation is not None
    expected_evaluation = list(plain.evaluation)
    with PrefetchedBatches(made.train, CPU) as ahead:
        for _ in range(12):
            found = list(made.evaluation)
            assert all(map(same, found, expected_evaluation))
            assert len(found) == len(expected_evaluation)
            assert same(next(ahead), next(plain.train))


def test_documents_are_read_by_one_thread_at_a_time(
    corpus_spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_dataset(corpus_spec("text", evaluation={"fraction": 0.2}), BYTES)
    assert data.evaluation is not None
    users: list[str] = []
    inside: list[str] = []
    read = data.corpus.source.records
    entered, leave = threading.Event(), threading.Event()

    def records(numbers: Any) -> Any:
        inside.append(threading.current_thread().name)
        assert len(inside) == 1
        users.append(inside[0])
        if inside[0] == "batches":
            entered.set()
            assert leave.wait(PATIENCE)
        inside.pop()
        return read(numbers)

    monkeypatch.setattr(data.corpus.source, "records", records)
    with PrefetchedBatches(data.train, CPU) as ahead:
        first: list[Batch] = []
        taker = threading.Thread(target=lambda: first.append(next(ahead)))
        taker.start()
        assert entered.wait(PATIENCE)
        evaluations: list[list[Batch]] = []
        evaluator = threading.Thread(target=lambda: evaluations.append(list(data.evaluation or ())))
        evaluator.start()
        leave.set()
        taker.join(PATIENCE)
        evaluator.join(PATIENCE)
    assert len(first) == len(evaluations) == 1
    assert evaluations[0]
    assert len(set(users)) == 2


def test_it_goes_on_from_a_state_of_what_was_taken(corpus_spec: Spec) -> None:
    spec = corpus_spec("text")
    plain = open_dataset(spec, BYTES).train
    batches = list(itertools.islice(plain, 30))
    with PrefetchedBatches(open_dataset(spec, BYTES).train, CPU) as ahead:
        for _ in range(11):
            next(ahead)
        state = json.loads(json.dumps(ahead.state_dict()))
        for expected in batches[11:20]:
            assert same(next(ahead), expected)
        # Back, in the same object; and on, in one of its own.
        ahead.load_state_dict(state)
        assert ahead.state_dict() == state
        for expected in batches[11:20]:
            assert same(next(ahead), expected)
    resumed = open_dataset(spec, BYTES).train
    resumed.load_state_dict(state)
    with PrefetchedBatches(resumed, CPU) as ahead:
        for expected in batches[11:]:
            assert same(next(ahead), expected)


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"most": 5}, 5),
        ({"most_bytes": 1}, 2),
        ({"most_bytes": 1, "at_once": 7}, 7),
        ({"most": 3, "at_once": 4}, 4),
        ({"most_bytes": 1, "at_once": 7, "most_bytes_at_once": 3 * TOKENS * 28}, 3),
        # One batch: three fields of 8 bytes a token, and one of 4.
        ({"most_bytes": 3 * TOKENS * 28}, 3),
    ],
)
def test_so_many_are_made_ahead_and_no_more(options: dict[str, int], bound: int) -> None:
    source = Numbered()
    with PrefetchedBatches(source, CPU, **options) as ahead:
        assert source.made == 0
        assert threads() == []
        for taken in range(1, 9):
            assert number_of(next(ahead)) == taken
            assert source.has_made(taken + bound)
        assert not source.has_made(9 + bound, within=0.2)
    assert source.makers == {"batches"}


def test_no_random_number_is_drawn(corpus_spec: Spec) -> None:
    random_state.seed_everything(3, CPU)
    before = random_state.capture()
    train = open_dataset(corpus_spec("text", task="masked_lm"), tokenizer_for("masked_lm")).train
    with PrefetchedBatches(train, CPU) as ahead:
        for _ in range(20):
            next(ahead)
    assert random_state.capture() == before


def _digest(make: Callable[[], Any]) -> int:
    with PrefetchedBatches(make(), CPU) as ahead:
        return sum(int(batch.input_ids.sum()) for batch in itertools.islice(ahead, 12))


def test_a_forked_process_makes_its_own_and_disturbs_none(corpus_spec: Spec) -> None:
    spec = corpus_spec("text")

    def make() -> Any:
        return open_dataset(spec, BYTES).train

    expected = _digest(make)
    plain = make()
    with PrefetchedBatches(make(), CPU) as ahead:
        assert same(next(ahead), next(plain))
        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)
        child = context.Process(target=lambda: sending.send(_digest(make)))
        child.start()
        for _ in range(20):
            assert same(next(ahead), next(plain))
        assert receiving.poll(PATIENCE)
        assert receiving.recv() == expected
        child.join(PATIENCE)
        assert child.exitcode == 0
