"""Documents that tell themselves apart, and what batches made of them hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fp8core.data import Batch
from fp8core.data.tokenizer_build import byte_tokenizer
from fp8core.data.tokenizers import Tokenizer

Spec = Callable[..., Any]
BYTES = Tokenizer(byte_tokenizer())
ENCODER = Tokenizer(byte_tokenizer(encoder=True))
END = 256


def texts(count: int) -> list[str]:
    """Documents of 1 to 90 characters, each told apart by its beginning."""
    return [f"{index:03d}:" + "x" * (index * 37 % 87) for index in range(count)]


KINDS: list[tuple[str, bool | None, str]] = [
    ("text", True, "causal_lm"),
    ("text", False, "causal_lm"),
    ("prompt_completion", True, "causal_lm"),
    ("prompt_completion", False, "causal_lm"),
    ("labelled", None, "sequence_classification"),
    ("text", True, "masked_lm"),
    ("text", False, "masked_lm"),
]


def tokenizer_for(task: str) -> Tokenizer:
    return BYTES if task == "causal_lm" else ENCODER


def same(left: Batch, right: Batch) -> bool:
    fields = ("input_ids", "labels", "position_ids", "document_ids")
    masks = (left.attention_mask, right.attention_mask)
    return (
        all(torch.equal(getattr(left, name), getattr(right, name)) for name in fields)
        and (left.token_count, left.target_count) == (right.token_count, right.target_count)
        and (masks[0] is None) == (masks[1] is None)
        and (masks[0] is None or masks[1] is None or torch.equal(*masks))
    )


def stream_of(batches: Iterable[Batch]) -> list[int]:
    """All real tokens, row after row."""
    return [
        token
        for batch in batches
        for ids, owners in zip(batch.input_ids, batch.document_ids, strict=True)
        for token in ids[owners >= 0].tolist()
    ]


def documents_of(batches: Iterable[Batch]) -> list[list[int]]:
    """Token lists of all documents (or their parts), in the order of rows."""
    found = []
    for batch in batches:
        for ids, owners in zip(batch.input_ids, batch.document_ids, strict=True):
            for document in range(int(owners.max()) + 1):
                found.append(ids[owners == document].tolist())
    return found
