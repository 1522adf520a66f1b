"""Batches made ahead: the same as without, with place, errors and end of what was taken."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fp8core.data import Batch, Statistics, open_dataset, prefetch
from fp8core.data.prefetch import PrefetchedBatches, WaitInterrupted
from fp8core.errors import DataInvalid
from fp8core.training import random_state
from tests.fp8core.data.documents import BYTES, KINDS, Spec, same, tokenizer_for

CPU = torch.device("cpu")
# A liveness bound: nothing here takes a tenth of it.
PATIENCE = 60.0
TOKENS = 16


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    assert threads() == []
    yield
    assert threads() == []


class Numbered:
    """A source of batches that hold their number, and may be held up or fail at one."""

    def __init__(self, *, end: int | None = None) -> None:
        self._changed = threading.Condition()
        self.end = end
        self.made = 0
        self.failing: dict[int, BaseException] = {}
        self.held_at: int | None = None
        self.is_held = threading.Event()
        self.let_go = threading.Event()
        self.makers: set[str] = set()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        number = self.made + 1
        self.makers.add(threading.current_thread().name)
        if number == self.held_at:
            self.is_held.set()
            assert self.let_go.wait(PATIENCE)
        if number in self.failing:
            raise self.failing[number]
        if number - 1 == self.end:
            raise StopIteration
        with self._changed:
            self.made = number
            self._changed.notify_all()
        ids = torch.full((1, TOKENS), number)
        owners = torch.zeros(1, TOKENS, dtype=torch.int32)
        return Batch(ids, ids, None, ids, owners, TOKENS, TOKENS, True)

    def has_made(self, number: int, within: float = PATIENCE) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.made >= number, within)

    @property
    def statistics(self) -> Statistics:
        return Statistics(tokens=TOKENS * self.made)

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made, "statistics": {"tokens": TOKENS * self.made}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]


def number_of(batch: Batch) -> int:
    return int(batch.input_ids[0, 0])


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


@pytest.mark.parametrize("error", [DataInvalid("data.jsonl, line 7: bad"), MemoryError("no room")])
def test_an_error_is_raised_where_its_batch_is_taken(error: BaseException) -> None:
    source = Numbered()
    source.failing = {5: error}
    with PrefetchedBatches(source, CPU) as ahead:
        assert number_of(next(ahead)) == 1
        assert source.has_made(4)
        assert [number_of(next(ahead)) for _ in range(3)] == [2, 3, 4]
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                next(ahead)
            assert caught.value is error
        assert ahead.state_dict()["made"] == 4


def test_an_error_that_nobody_comes_to_is_not_raised() -> None:
    source = Numbered()
    source.failing = {3: DataInvalid("bad")}
    with PrefetchedBatches(source, CPU) as ahead:
        assert [number_of(next(ahead)) for _ in range(2)] == [1, 2]


def test_what_the_thread_itself_fails_with_is_raised_too() -> None:
    # This PyTorch has no CUDA, or this machine has no such GPU.
    ahead = PrefetchedBatches(Numbered(), torch.device("cuda", 99))
    with ahead, pytest.raises((AssertionError, RuntimeError)):
        next(ahead)


def test_a_thread_that_cannot_begin_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with (
        pytest.raises(RuntimeError, match="can't start new thread"),
        PrefetchedBatches(Numbered(), CPU) as ahead,
    ):
        next(ahead)


def test_nobody_waits_for_a_thread_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without memory it cannot even say so.
    monkeypatch.setattr(prefetch, "_Made", Mock(side_effect=MemoryError))
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    raised: list[BaseException] = []

    def take(ahead: PrefetchedBatches) -> None:
        try:
            next(ahead)
        except RuntimeError as error:
            raised.append(error)

    with PrefetchedBatches(Numbered(), CPU) as ahead:
        taker = threading.Thread(target=take, args=(ahead,))
        taker.start()
        taker.join(PATIENCE)
        assert not taker.is_alive()
    assert "died" in str(raised[0])


def test_closing_waits_for_the_batch_being_made_and_makes_no_other() -> None:
    source = Numbered()
    source.held_at = 3
    ahead = PrefetchedBatches(source, CPU)
    next(ahead)
    assert source.is_held.wait(PATIENCE)
    closer = threading.Thread(target=ahead.close)
    closer.start()
    (thread,) = threads()
    source.let_go.set()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert not thread.is_alive()
    assert source.made == 3
    assert ahead.state_dict()["made"] == 1
    with pytest.raises(RuntimeError, match="closed"):
        next(ahead)
    ahead.close()


def test_who_waits_for_a_batch_is_told_of_the_end() -> None:
    source = Numbered()
    source.held_at = 1
    ahead = PrefetchedBatches(source, CPU)
    raised: list[BaseException] = []

    def take() -> None:
        try:
            next(ahead)
        except RuntimeError as error:
            raised.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    assert source.is_held.wait(PATIENCE)
    closer = threading.Thread(target=ahead.close)
    closer.start()
    taker.join(PATIENCE)
    assert len(raised) == 1
    source.let_go.set()
    closer.join(PATIENCE)


def test_a_wait_is_broken_off_where_its_taker_is_wanted_elsewhere() -> None:
    source = Numbered()
    source.held_at = 3
    wanted = threading.Event()
    asked: list[bool] = []

    def interrupted() -> bool:
        asked.append(wanted.is_set())
        return wanted.is_set()

    with PrefetchedBatches(source, CPU, interrupted=interrupted) as ahead:
        assert number_of(next(ahead)) == 1
        assert source.is_held.wait(PATIENCE)
        asked.clear()
        assert number_of(next(ahead)) == 2
        assert asked == [], "a batch that is ready is taken without a look"
        state = ahead.state_dict()
        taken: list[Batch | None] = []

        def take() -> None:
            try:
                taken.append(next(ahead))
            except WaitInterrupted:
                taken.append(None)

        taker = threading.Thread(target=take)
        taker.start()
        wanted.set()
        taker.join(PATIENCE)
        assert taken == [None]
        assert ahead.state_dict() == state
        source.let_go.set()
        assert source.has_made(5)
        assert number_of(next(ahead)) == 3
        assert ahead.state_dict()["made"] == 3


def test_a_read_that_does_not_return_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.01)
    source = Numbered()
    source.held_at = 2
    with PrefetchedBatches(source, CPU) as ahead:
        next(ahead)
        assert source.is_held.wait(PATIENCE)
        state = ahead.state_dict()
    (thread,) = threads()
    assert thread.daemon
    with pytest.raises(RuntimeError, match="still being read"):
        ahead.load_state_dict(state)
    source.let_go.set()
    thread.join(PATIENCE)


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
