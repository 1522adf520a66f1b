"""From rows to a batch: padding, and the masking of masked language models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fp8core.data.batch import IGNORED, PADDING_DOCUMENT, TOKEN_MULTIPLE, Batch, round_up
from fp8core.data.order import Purpose, hash_numbers, uniform
from fp8core.data.rows import Row
from fp8core.data.tokenizers import Tokenizer
from fp8core.errors import SpecRefused

__all__ = ["Collator", "MaskedTokens"]

# Masked tokens: this share becomes the mask token, the next a random token, the rest stays.
_BECOMES_MASK = 0.8
_BECOMES_RANDOM = 0.1


class MaskedTokens:
    """The corruption of BERT (Devlin et al. 2019, section 3.1): 80 % mask, 10 % random, 10 % kept.

    Which tokens, and what becomes of them, is a hash of (seed, row number, position): the same row
    number always gets the same masks. Special tokens are never chosen. A row in which chance picks
    none gets one all the same, so that no batch is without targets.
    """

    def __init__(self, tokenizer: Tokenizer, probability: float, seed: int) -> None:
        if tokenizer.mask_id is None:
            raise SpecRefused(
                "masked_lm needs a tokenizer with a mask token; this one has none",
                pointer="/tokenizer",
            )
        self._mask_id = tokenizer.mask_id
        self._special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._special[sorted(tokenizer.special_ids)] = True
        self._ordinary = np.flatnonzero(~self._special).astype(np.int32)
        self._probability = probability
        self._seed = seed

    def can_choose(self, ids: NDArray[np.int32]) -> bool:
        """Whether any of the tokens [n] is an ordinary one."""
        return not bool(self._special[ids].all())

    def apply(
        self, ids: NDArray[np.int32], row_number: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(corrupted ids, labels) of one row, both [n] int32."""
        positions = np.arange(len(ids), dtype=np.uint64)

        def draw(purpose: Purpose) -> NDArray[np.uint64]:
            return hash_numbers(self._seed, purpose, positions, row_number)

        allowed = ~self._special[ids]
        choice = uniform(draw(Purpose.MASK_CHOICE))
        chosen = allowed & (choice < self._probability)
        if not chosen.any() and allowed.any():
            chosen[np.argmin(np.where(allowed, choice, 2.0))] = True
        action = uniform(draw(Purpose.MASK_ACTION))
        masked = chosen & (action < _BECOMES_MASK)
        random = chosen & ~masked & (action < _BECOMES_MASK + _BECOMES_RANDOM)
        drawn = self._ordinary[(draw(Purpose.MASK_TOKEN) % np.uint64(len(self._ordinary)))]
        corrupted = np.where(masked, np.int32(self._mask_id), np.where(random, drawn, ids))
        return corrupted, np.where(chosen, ids, np.int32(IGNORED))


@dataclass(frozen=True)
class Collator:
    """Pads rows to one length, a multiple of ``multiple``.

    Packed batches have the length ``sequence_length`` rounded up, whatever their rows hold;
    unpacked ones that of their longest row. Padding stands at the end, has no labels and the
    document -1.
    """

    task: str
    sequence_length: int
    packed: bool
    pad_id: int
    masking: MaskedTokens | None = None
    multiple: int = TOKEN_MULTIPLE

    def width(self, rows: Sequence[Row]) -> int:
        """The length of each row of a batch of these."""
        longest = self.sequence_length if self.packed else max(len(row.ids) for row in rows)
        return round_up(longest, self.multiple)

    def __call__(self, rows: Sequence[Row], first_row_number: int) -> Batch:
        """A batch [len(rows), T]; ``first_row_number`` is that of the first row in the run."""
        shape = (len(rows), self.width(rows))
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        documents = np.full(shape, PADDING_DOCUMENT, dtype=np.int32)
        positions = np.zeros(shape, dtype=np.int64)
        for index, row in enumerate(rows):
            row_ids, row_labels = row.ids, row.labels
            if self.masking is not None and len(row_ids):
                row_ids, row_labels = self.masking.apply(row_ids, first_row_number + index)
            size = len(row_ids)
            ids[index, :size] = row_ids
            labels[index, :size] = row_labels
            documents[index, :size] = row.document_ids
            positions[index, :size] = row.position_ids
        real = documents != PADDING_DOCUMENT
        classify = self.task == "sequence_classification"
        if classify:
            # A row of padding alone has no class.
            labels = np.array(
                [row.label if len(row.ids) else IGNORED for row in rows], dtype=np.int64
            )
        return Batch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            attention_mask=None if self.packed else torch.from_numpy(real),
            position_ids=torch.from_numpy(positions),
            document_ids=torch.from_numpy(documents),
            token_count=int(real.sum()),
            target_count=int((labels != IGNORED).sum()),
            causal=self.task == "causal_lm",
            document_bounds=_bounds(documents if self.packed else real),
        )

    def has_targets(self, row: Row) -> bool:
        """Whether a row can teach anything: the rest of a document of one token cannot."""
        if self.masking is not None:
            return self.masking.can_choose(row.ids)
        if self.task == "sequence_classification":
            return len(row.ids) > 0
        return bool((row.labels != IGNORED).any())


def _bounds(documents: NDArray[np.int32] | NDArray[np.bool_]) -> torch.Tensor:
    """``Batch.document_bounds`` of document ids [B, T], or of where real tokens are."""
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    bounds = np.append(np.flatnonzero(begins), documents.size)
    return torch.from_numpy(bounds.astype(np.int32))
