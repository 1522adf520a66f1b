"""The next documents are encoded while those that are ready are used, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, get_ident

import numpy as np
import pytest

from fp8core.data.formats import Example
from fp8core.data.order import EpochOrder
from fp8core.data.rows import DocumentFeed
from fp8core.errors import DataInvalid

TOKENS = 1000


class Encoder:
    """Encodes document n as n, n, ...; may be held up, or fail, at a document."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.chunks: list[list[int]] = []
        self.wait_at: int | None = None
        self.fail_at: int | None = None
        self.begun, self.go_on = Event(), Event()

    def __call__(self, numbers: Sequence[int]) -> list[Example]:
        self.threads.append(get_ident())
        self.chunks.append(list(numbers))
        if self.wait_at in numbers:
            self.begun.set()
            assert self.go_on.wait(30)
        if self.fail_at in numbers:
            raise DataInvalid(f"document {self.fail_at} is bad")
        targets = np.ones(TOKENS, dtype=bool)
        return [Example(np.full(TOKENS, n, dtype=np.int32), targets, None, -1) for n in numbers]


@pytest.fixture
def ahead() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def order(epochs: int = 2) -> EpochOrder:
    documents = np.arange(200, dtype=np.uint32)
    return EpochOrder(documents, seed=3, shuffle=True, epochs=epochs)


def ids(feed: DocumentFeed, positions: Sequence[int]) -> list[int | None]:
    examples = [feed.get(position) for position in positions]
    return [None if example is None else int(example.ids[0]) for example in examples]


def test_it_gives_what_one_thread_gives_also_where_it_goes_on_elsewhere(
    ahead: ThreadPoolExecutor,
) -> None:
    # To the end of all epochs, back to the middle, and past the end.
    positions = [*range(403), *range(120, 260), 7, 8, 399, 400]
    alone, beside = Encoder(), Encoder()
    expected = ids(DocumentFeed(order(), alone), positions)
    assert expected.count(None) == 4
    assert ids(DocumentFeed(order(), beside, ahead), positions) == expected
    assert set(alone.threads) == {get_ident()}
    assert len(set(beside.threads)) == 2


def test_documents_are_used_while_the_next_are_encoded(ahead: ThreadPoolExecutor) -> None:
    encoder = Encoder()
    feed = DocumentFeed(order(), encoder, ahead)
    # The first document is encoded alone, and tells how many more are so many tokens.
    sequence = order().slice(0, 100)
    encoder.wait_at = sequence[50]
    assert ids(feed, range(33)) == sequence[:33]
    assert encoder.begun.wait(30)
    assert encoder.chunks[2] == sequence[33:65]
    assert not encoder.go_on.is_set()
    encoder.go_on.set()
    assert ids(feed, range(33, 100)) == sequence[33:]
    here = [chunk for thread, chunk in zip(encoder.threads, encoder.chunks, strict=True)
            if thread == get_ident()]  # fmt: skip
    assert here == [sequence[:1]]


def test_what_is_bad_is_told_when_its_turn_comes(ahead: ThreadPoolExecutor) -> None:
    encoder = Encoder()
    feed = DocumentFeed(order(), encoder, ahead)
    sequence = order().slice(0, 100)
    encoder.fail_at = sequence[50]
    assert ids(feed, range(33)) == sequence[:33]
    with pytest.raises(DataInvalid, match=f"document {sequence[50]} is bad"):
        feed.get(33)
