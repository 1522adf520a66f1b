"""A source of batches that a thread makes ahead: held up, or failing, where a test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8core.data import Batch, Statistics

__all__ = ["CPU", "PATIENCE", "TOKENS", "Numbered", "no_thread_is_left", "number_of", "threads"]

CPU = torch.device("cpu")
# A liveness bound: nothing here takes a tenth of it.
PATIENCE = 60.0
TOKENS = 16


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
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
