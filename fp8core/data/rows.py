"""From documents to rows of at most ``length`` tokens: packed or one by one.

Each stream of rows walks the documents in their order and can say where it stands in a few numbers,
from which it goes on with exactly the row that would have come next. A restart encodes at most one
window of documents again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fp8core.data.batch import IGNORED
from fp8core.data.formats import Example
from fp8core.data.order import EpochOrder
from fp8core.errors import DataInvalid

__all__ = [
    "DocumentFeed",
    "Row",
    "RowStream",
    "SingleRows",
    "SplitRows",
    "WholeRows",
    "empty_row",
    "nothing_to_learn",
]

# Documents are encoded together, as many as may hold about so many tokens.
_MOST_AT_ONCE = 64
_TOKENS_AT_ONCE = 32_768
_WINDOW_ROWS = 32


@dataclass(frozen=True)
class Row:
    """One sequence without padding; without tokens when it only reports what was left out.

    ``ids``, ``labels``, ``document_ids``, ``position_ids`` [n] (int32; -100 in ``labels``: no
    target). ``label``: class id or -1. ``target_bytes``: UTF-8 bytes of the targets, where counted.
    ``documents``: documents that end in this row; ``truncated`` and ``dropped``: documents that
    were cut, or left out, on the way to it.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    document_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    label: int
    target_bytes: int
    documents: int
    truncated: int
    dropped: int


class DocumentFeed:
    """Examples by their position in the order; encodes some documents ahead."""

    def __init__(self, order: EpochOrder, encode: Callable[[Sequence[int]], list[Example]]) -> None:
        self._order = order
        self._encode = encode
        self._start = 0
        self._ready: list[Example] = []
        self._at_once = 1

    @property
    def documents_per_epoch(self) -> int:
        return self._order.documents_per_epoch

    def get(self, position: int) -> Example | None:
        """The example at ``position``; None at the end of all epochs."""
        index = position - self._start
        if not 0 <= index < len(self._ready):
            self._ready = self._encode(self._order.slice(position, self._at_once))
            self._start, index = position, 0
            tokens = sum(len(example.ids) for example in self._ready)
            fitting = _TOKENS_AT_ONCE * len(self._ready) // max(1, tokens)
            self._at_once = min(_MOST_AT_ONCE, max(1, fitting))
        return self._ready[index] if self._ready else None


class RowStream(Protocol):
    @property
    def documents_per_epoch(self) -> int: ...

    def next_row(self) -> Row | None:
        """The next row; None at the end of all epochs."""
        ...

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Stream:
    """What the three streams share: a position, and a guard against data without any token."""

    def __init__(self, feed: DocumentFeed, length: int, *, shifted: bool) -> None:
        self._feed = feed
        self._length = length
        self._shifted = shifted
        self._position = 0

    @property
    def documents_per_epoch(self) -> int:
        return self._feed.documents_per_epoch

    def _refuse_if_endless(self, empty_in_a_row: int) -> None:
        if empty_in_a_row >= self._feed.documents_per_epoch:
            raise nothing_to_learn(self._length)


class SplitRows(_Stream):
    """Packing of text: rows are filled to the last token, and a document goes on in the next row.

    The rest of a document begins anew there: position 0, and it sees nothing of the row before.
    """

    def __init__(self, feed: DocumentFeed, length: int, *, shifted: bool) -> None:
        super().__init__(feed, length, shifted=shifted)
        self._offset = 0

    def next_row(self) -> Row | None:
        parts: list[Example] = []
        room = self._length
        ended = dropped = empty = 0
        while room:
            example = self._feed.get(self._position)
            if example is None:
                break
            stop = min(len(example.ids), self._offset + room)
            if stop > self._offset:
                parts.append(_slice(example, self._offset, stop))
                room -= stop - self._offset
                empty = 0
            if stop == len(example.ids):
                if stop:
                    ended += 1
                else:
                    dropped += 1
                    empty += 1
                    self._refuse_if_endless(empty)
                self._position, self._offset = self._position + 1, 0
            else:
                self._offset = stop
        if not parts:
            return empty_row(dropped) if dropped else None
        return _assemble(parts, self._shifted, documents=ended, dropped=dropped)

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._offset = int(state["position"]), int(state["offset"])


class WholeRows(_Stream):
    """Packing of prompts and chats: every document whole in one row (best fit, decreasing).

    Works on windows of about 32 rows' worth of documents, so that little room stays empty.
    """

    def __init__(self, feed: DocumentFeed, length: int, *, shifted: bool) -> None:
        super().__init__(feed, length, shifted=shifted)
        self._row = 0
        self._next_position = 0
        self._window: list[Row] | None = None

    def next_row(self) -> Row | None:
        if self._window is None:
            self._window = self._read_window()
        while self._row >= len(self._window):
            if not self._window:
                return None
            self._position, self._row = self._next_position, 0
            self._window = self._read_window()
        row = self._window[self._row]
        self._row += 1
        return row

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position, "row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._row = int(state["position"]), int(state["row"])
        self._window = None

    def _read_window(self) -> list[Row]:
        examples: list[Example] = []
        tokens = dropped = empty = 0
        position = self._position
        while tokens < _WINDOW_ROWS * self._length:
            example = self._feed.get(position)
            if example is None:
                break
            position += 1
            if len(example.ids):
                examples.append(example)
                tokens += len(example.ids)
                empty = 0
            else:
                dropped += 1
                empty += 1
                self._refuse_if_endless(empty)
        self._next_position = position
        rows: list[Row] = [empty_row(dropped)] if dropped else []
        for members in _best_fit(examples, self._length):
            parts = [examples[member] for member in members]
            rows.append(_assemble(parts, self._shifted, documents=len(parts), dropped=0))
        return rows


class SingleRows(_Stream):
    """No packing: one document a row."""

    def next_row(self) -> Row | None:
        dropped = 0
        while (example := self._feed.get(self._position)) is not None:
            self._position += 1
            if len(example.ids):
                return _assemble([example], self._shifted, documents=1, dropped=dropped)
            dropped += 1
            self._refuse_if_endless(dropped)
        return empty_row(dropped) if dropped else None

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])


def nothing_to_learn(length: int) -> DataInvalid:
    """The error for data that would be read for ever without giving a batch."""
    return DataInvalid(
        f"no document has anything to learn within {length} tokens",
        pointer="/training/sequence_length",
    )


def empty_row(dropped: int = 0) -> Row:
    """A row without tokens: what becomes of it is padding, or a count of dropped documents."""
    nothing = np.zeros(0, dtype=np.int32)
    return Row(nothing, nothing, nothing, nothing, -1, 0, 0, 0, dropped)


def _best_fit(examples: Sequence[Example], length: int) -> list[list[int]]:
    """Rows as lists of example numbers, ascending by their first."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(range(len(examples)), key=lambda i: -len(examples[i].ids)):
        size = len(examples[index].ids)
        at = bisect_left(room, (size, -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = length, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(room, (left - size, row))
    return sorted(sorted(row) for row in rows)


def _slice(example: Example, start: int, stop: int) -> Example:
    if start == 0 and stop == len(example.ids):
        return example
    targets, lengths = example.targets, example.byte_lengths
    return Example(
        example.ids[start:stop],
        None if targets is None else targets[start:stop],
        None if lengths is None else lengths[start:stop],
        example.label,
        # Counted once, with the document's end.
        example.truncated and stop == len(example.ids),
    )


def _assemble(parts: Sequence[Example], shifted: bool, *, documents: int, dropped: int) -> Row:
    sizes = [len(part.ids) for part in parts]
    ids = np.concatenate([part.ids for part in parts])
    targets = np.concatenate(
        [np.ones(len(p.ids), dtype=bool) if p.targets is None else p.targets for p in parts]
    )
    if shifted:
        # Nothing predicts a document's first token: what stands before it is another document.
        targets[np.cumsum([0, *sizes[:-1]])] = False
    lengths = [part.byte_lengths for part in parts if part.byte_lengths is not None]
    return Row(
        ids=ids,
        labels=np.where(targets, ids, np.int32(IGNORED)),
        document_ids=np.repeat(np.arange(len(parts), dtype=np.int32), sizes),
        position_ids=np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
        label=parts[0].label,
        target_bytes=int(np.concatenate(lengths)[targets].sum()) if lengths else 0,
        documents=documents,
        truncated=sum(part.truncated for part in parts),
        dropped=dropped,
    )
