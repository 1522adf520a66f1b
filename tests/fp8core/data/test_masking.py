"""Masks of masked language models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8core.data.collate import MaskedTokens
from fp8core.data.tokenizer_build import byte_tokenizer
from fp8core.data.tokenizers import Tokenizer
from fp8core.errors import SpecRefused

TOKENIZER = Tokenizer(byte_tokenizer(encoder=True))
MASK = 258


def test_shares_are_those_of_bert() -> None:
    masking = MaskedTokens(TOKENIZER, 0.15, seed=0)
    ids = np.tile(np.arange(200, dtype=np.int32), 500)  # 100,000 ordinary tokens
    corrupted, labels = masking.apply(ids, row_number=3)
    chosen = labels != -100
    assert (labels[chosen] == ids[chosen]).all()
    assert (corrupted[~chosen] == ids[~chosen]).all()
    # Standard deviations: 0.0011 of the choice, below 0.004 of the actions.
    assert chosen.mean() == pytest.approx(0.15, abs=0.006)
    assert (corrupted[chosen] == MASK).mean() == pytest.approx(0.8, abs=0.016)
    changed = chosen & (corrupted != MASK) & (corrupted != ids)
    assert changed.sum() / chosen.sum() == pytest.approx(0.1, abs=0.012)
    assert corrupted[changed].max() < 256
    assert len(np.unique(corrupted[changed])) > 200


def test_masks_are_a_function_of_seed_and_row() -> None:
    ids = np.arange(100, dtype=np.int32)
    first = MaskedTokens(TOKENIZER, 0.5, seed=1).apply(ids, 7)
    again = MaskedTokens(TOKENIZER, 0.5, seed=1).apply(ids, 7)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[1], MaskedTokens(TOKENIZER, 0.5, seed=1).apply(ids, 8)[1])
    assert not np.array_equal(first[1], MaskedTokens(TOKENIZER, 0.5, seed=2).apply(ids, 7)[1])


def test_special_tokens_are_never_chosen_and_every_row_has_a_target() -> None:
    masking = MaskedTokens(TOKENIZER, 0.01, seed=0)
    ids = np.array([259, 65, 66, 256], dtype=np.int32)
    for row in range(300):
        corrupted, labels = masking.apply(ids, row)
        assert (labels[[0, 3]] == -100).all()
        assert corrupted[[0, 3]].tolist() == [259, 256]
        assert (labels != -100).sum() >= 1
    only_special = np.array([259, 256], dtype=np.int32)
    assert (masking.apply(only_special, 0)[1] == -100).all()


def test_a_tokenizer_without_mask_is_refused() -> None:
    bare: Any = byte_tokenizer()
    bare.mask_token = None
    with pytest.raises(SpecRefused, match="needs a tokenizer with a mask token") as raised:
        MaskedTokens(Tokenizer(bare), 0.15, seed=0)
    assert raised.value.pointer == "/tokenizer"
