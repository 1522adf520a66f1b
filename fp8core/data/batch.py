"""One micro-batch, as the training loop receives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fp8core.spec.recipe import TOKEN_MULTIPLE

__all__ = ["IGNORED", "PADDING_DOCUMENT", "TOKEN_MULTIPLE", "Batch", "round_up"]

IGNORED = -100
"""The label of a position that is no target (the convention of Hugging Face's losses)."""

PADDING_DOCUMENT = -1
"""The document id of padding."""


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens, T a multiple of 16.

    ``input_ids`` [B, T] int64. ``labels`` [B, T] int64 with -100 where there is no target, or [B]
    int64 class ids for classification. Labels are not shifted: the loss of a causal model at t is
    about ``labels[t + 1]``; the first token of every document is -100, so no prediction crosses
    documents. ``attention_mask`` [B, T] bool, True at real tokens, or None when packed: then
    ``document_ids`` [B, T] int32 (-1: padding) say who may attend to whom, see
    ``fp8core.data.attention``. ``position_ids`` [B, T] int64 restart at 0 in every document.
    ``token_count``: real tokens, without padding. ``target_count``: labels that are not -100 (rows
    for classification). ``causal``: whether tokens may only look back. ``document_bounds`` [n + 1]
    int32: where each document begins in the rows laid one after another, a run of padding counted
    as one, and the end of the last (what an unpacked row holds is one); None: not counted yet.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor
    document_ids: Tensor
    token_count: int
    target_count: int
    causal: bool
    document_bounds: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.attention_mask is None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def pinned(self) -> Batch:
        """The same batch in page-locked memory of the host, from which a GPU copies by itself."""
        return self._each(_pinned)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch on ``device``. ``non_blocking``: nobody waits for the copy to a GPU."""
        pinned = non_blocking and torch.device(device).type == "cuda"

        def moved(tensor: Tensor) -> Tensor:
            # From pageable memory the copy would wait for all that the device has to do before it.
            source = tensor.pin_memory() if pinned and tensor.device.type == "cpu" else tensor
            return source.to(device, non_blocking=non_blocking)

        return self._each(moved)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {name: change(each) for name, each in self._tensors().items()}
        return replace(self, **changed)

    def _tensors(self) -> dict[str, Tensor]:
        """By field; those there are."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _pinned(tensor: Tensor) -> Tensor:
    # Tensor.pin_memory() would copy with all of torch's threads, of which each caller has its own.
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.numpy()[...] = tensor.numpy()
    return there


def round_up(length: int, multiple: int = TOKEN_MULTIPLE) -> int:
    """The smallest multiple that is at least ``length`` and not zero."""
    return max(multiple, -(-length // multiple) * multiple)
