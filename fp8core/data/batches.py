"""Batches for training, with a place to go on from, and for evaluation.

All ranks walk the same stream of rows and each collates its own: of every round of
``world * batch_size`` rows, rank r takes ``batch_size`` from ``r * batch_size`` on. So the order of
the rows does not depend on the number of ranks, one state serves them all, and a run may go on with
another number. The price is that every rank encodes every document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from fp8core.data.batch import Batch
from fp8core.data.collate import Collator
from fp8core.data.rows import Row, RowStream, empty_row, nothing_to_learn
from fp8core.errors import DataInvalid

__all__ = ["BatchSource", "EvaluationBatches", "Statistics", "TrainingBatches"]

_STATE_VERSION = 1


@dataclass
class Statistics:
    """What all ranks together have been given since the start of training.

    ``documents`` counts those that were read to their end; ``truncated`` those cut at the sequence
    length, ``dropped`` those with nothing to learn within it. ``tokens`` are real ones, ``padding``
    the rest of all batches.
    """

    documents: int = 0
    truncated: int = 0
    dropped: int = 0
    tokens: int = 0
    padding: int = 0

    @property
    def padding_share(self) -> float:
        total = self.tokens + self.padding
        return self.padding / total if total else 0.0


class TrainingBatches(Protocol):
    """Batches for training, one after another, with a place to go on from."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    @property
    def statistics(self) -> Statistics: ...

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch that was taken, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BatchSource:
    """An iterator over training batches; ends only with the last epoch, if there is one.

    The final round may be short: its rows are dealt out evenly, and dropped when there are fewer
    rows than ranks, as all ranks must take the same number of steps. Data that gives no batch at
    all is an error: a run over it would end at once, as if it had trained.
    """

    def __init__(
        self,
        stream: RowStream,
        collator: Collator,
        *,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        fingerprint: str = "",
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not within a world of {world}")
        self._stream = stream
        self._collator = collator
        self._batch_size = batch_size
        self._rank = rank
        self._world = world
        self._fingerprint = fingerprint
        self._rows = 0
        self.statistics = Statistics()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = _take(self._stream, self._collator, self._batch_size * self._world, self.statistics)
        if len(rows) < self._world:
            if self._rows == 0:
                raise self._too_little(len(rows))
            raise StopIteration
        shares = _deal(rows, self._batch_size, self._world)
        first = self._rows + sum(len(share) for share in shares[: self._rank])
        batch = self._collator(shares[self._rank], first)
        self._rows += len(rows)
        _count_tokens(self.statistics, shares, self._collator)
        return batch

    def _too_little(self, rows: int) -> DataInvalid:
        if rows == 0:
            return nothing_to_learn(self._collator.sequence_length)
        return DataInvalid(
            f"all the data fills {rows} sequence(s), and {self._world} ranks take one each",
            pointer="/data",
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values; the same on every rank."""
        counts = self.statistics
        return {
            "version": _STATE_VERSION,
            "fingerprint": self._fingerprint,
            "rows": self._rows,
            "stream": self._stream.state_dict(),
            "statistics": {
                "documents": counts.documents,
                "truncated": counts.truncated,
                "dropped": counts.dropped,
                "tokens": counts.tokens,
                "padding": counts.padding,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the last batch before ``state_dict`` was called.

        Raises ``DataInvalid`` when the data, its order or the tokenizer are not the same any more.
        """
        if state.get("version") != _STATE_VERSION:
            raise DataInvalid(
                f"the saved position in the data has the version {state.get('version')!r}, "
                f"this program reads {_STATE_VERSION}",
                pointer="/data",
            )
        if state["fingerprint"] != self._fingerprint:
            raise DataInvalid(
                "the data, its options or the tokenizer changed since the checkpoint was made; "
                "training cannot go on from its place in the data",
                pointer="/data",
            )
        self._stream.load_state_dict(state["stream"])
        self._rows = int(state["rows"])
        self.statistics = Statistics(**state["statistics"])


class EvaluationBatches:
    """The same batches at every iteration: all held-out documents once, in their own order.

    ``counted``: whether the first iteration that reaches the end counts the bytes of the targets.
    ``max_batches`` bounds them in units of ``batch_size`` rows, over all ranks together. Every rank
    gets the same number of batches; where rows run out, a rank gets one of padding without targets
    (only with several ranks).
    """

    def __init__(
        self,
        open_stream: Callable[[bool], RowStream],
        collator: Collator,
        *,
        batch_size: int,
        max_batches: int | None = None,
        rank: int = 0,
        world: int = 1,
        counted: bool = False,
    ) -> None:
        self._counted = counted
        self._open_stream = open_stream
        self._collator = collator
        self._batch_size = batch_size
        self._limit = None if max_batches is None else max_batches * batch_size
        self._rank = rank
        self._world = world
        self._measured: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Batch]:
        number = rounds = size = 0
        counted = self._counted and self._measured is None
        for rows in self._rounds(count_bytes=counted):
            shares = _deal(rows, self._batch_size, self._world)
            share = shares[self._rank]
            first = number + sum(len(before) for before in shares[: self._rank])
            yield self._collator(share or [empty_row()], first)
            number += len(rows)
            rounds += 1
            size += sum(row.target_bytes for row in rows)
        if counted:
            self._measured = rounds, size

    def __len__(self) -> int:
        """Batches of this rank; reads all documents where they were not counted yet."""
        return self._measure()[0]

    @property
    def target_bytes(self) -> int:
        """UTF-8 bytes of all targets of all ranks; reads all documents where they were not counted
        yet."""
        return self._measure()[1]

    def check(self) -> None:
        """Raises ``DataInvalid`` where there would be no batch; reads as far as the first."""
        next(self._rounds(count_bytes=False))

    def _measure(self) -> tuple[int, int]:
        if self._measured is None:
            rounds = size = 0
            for rows in self._rounds(count_bytes=True):
                rounds += 1
                size += sum(row.target_bytes for row in rows)
            self._measured = rounds, size
        return self._measured

    def _rounds(self, *, count_bytes: bool) -> Iterator[list[Row]]:
        stream = self._open_stream(count_bytes)
        left = self._limit
        size = self._batch_size * self._world
        empty = True
        while True:
            wanted = size if left is None else min(size, left)
            rows = _take(stream, self._collator, wanted, Statistics())
            if not rows:
                if empty:
                    raise DataInvalid(
                        f"none of the {stream.documents_per_epoch} documents that are held out has "
                        f"anything to learn within {self._collator.sequence_length} tokens",
                        pointer="/training/sequence_length",
                    )
                return
            empty = False
            yield rows
            if left is not None:
                left -= len(rows)


def _take(stream: RowStream, collator: Collator, count: int, statistics: Statistics) -> list[Row]:
    """Up to ``count`` rows with targets; fewer only at the end."""
    rows: list[Row] = []
    barren = 0
    while len(rows) < count and (row := stream.next_row()) is not None:
        statistics.documents += row.documents
        statistics.truncated += row.truncated
        statistics.dropped += row.dropped
        if collator.has_targets(row):
            rows.append(row)
            barren = 0
            continue
        barren += 1
        if barren > stream.documents_per_epoch:
            raise nothing_to_learn(collator.sequence_length)
    return rows


def _deal(rows: list[Row], batch_size: int, world: int) -> list[list[Row]]:
    """Each rank's rows: ``batch_size`` each of a full round, else as even as it gets."""
    if len(rows) == batch_size * world:
        sizes = [batch_size] * world
    else:
        sizes = [len(rows) // world + (rank < len(rows) % world) for rank in range(world)]
    shares: list[list[Row]] = []
    start = 0
    for size in sizes:
        shares.append(rows[start : start + size])
        start += size
    return shares


def _count_tokens(counts: Statistics, shares: list[list[Row]], collator: Collator) -> None:
    for share in shares:
        tokens = sum(len(row.ids) for row in share)
        counts.tokens += tokens
        counts.padding += collator.width(share) * len(share) - tokens
