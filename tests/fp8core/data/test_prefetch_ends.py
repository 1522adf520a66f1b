"""Batches made ahead: errors and ends come where a batch is taken, and nobody waits for ever."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch

from fp8core.data import Batch, prefetch
from fp8core.data.prefetch import PrefetchedBatches, WaitInterrupted
from fp8core.errors import DataInvalid
from tests.fp8core.data.numbered import (
    CPU,
    PATIENCE,
    Numbered,
    no_thread_is_left,
    number_of,
    threads,
)

__all__ = ["no_thread_is_left"]  # a fixture


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
