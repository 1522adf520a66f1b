"""How the tokens of a micro-batch fall into sequences, for attention that knows no masks.

A block needs no mask of shape [T, T]: it is enough to know where each sequence begins. Where no
token looks ahead, a row that is padded at its end is one sequence all the same; where they do, the
padding is a sequence of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.data.batch import Batch

__all__ = ["Sequences", "document_bounds"]


@dataclass(frozen=True)
class Sequences:
    """The sequences of ``rows`` rows of ``length`` tokens.

    ``bounds`` [n + 1] int32 on the tokens' device: where each of n sequences begins in the rows
    laid one after another, and the end of the last. None: each row is one sequence.
    """

    rows: int
    length: int
    bounds: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, *, causal: bool = True) -> Sequences | None:
        """Those of a batch for attention that is ``causal`` or not; None where packed documents are
        meant for the other."""
        rows, length = batch.input_ids.shape
        if causal and not batch.packed:
            return cls(rows, length)
        if batch.packed and batch.causal != causal:
            return None
        bounds = batch.document_bounds
        if bounds is None:
            mask = batch.attention_mask
            bounds = document_bounds(batch.document_ids if mask is None else mask)
        return cls(rows, length, None if bounds.numel() - 1 == rows else bounds)

    def mask(
        self, device: torch.device, window: int | None = None, *, causal: bool = True
    ) -> Tensor:
        """[B, 1, T, T] bool: who sees whom; where ``causal``, of those before it alone, and of the
        last ``window`` tokens (itself included)."""
        places = torch.arange(self.length, device=device)
        distance = places[:, None] - places[None, :]
        allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            allowed &= distance < window
        allowed = allowed.expand(self.rows, 1, self.length, self.length)
        if self.bounds is None:
            return allowed
        tokens = torch.arange(self.rows * self.length, device=device)
        owners = torch.bucketize(tokens, self.bounds.to(device), right=True)
        owners = owners.view(self.rows, 1, self.length)
        return allowed & (owners[..., :, None] == owners[..., None, :])

    def positions(self, device: torch.device) -> Tensor:
        """[B, T] int64: each token's place in its sequence."""
        tokens = torch.arange(self.rows * self.length, device=device)
        if self.bounds is None:
            return (tokens % self.length).view(self.rows, self.length)
        bounds = self.bounds.to(device).long()
        begins = bounds[torch.bucketize(tokens, bounds, right=True) - 1]
        return (tokens - begins).view(self.rows, self.length)


def document_bounds(document_ids: Tensor) -> Tensor:
    """``Sequences.bounds`` of ``document_ids`` [B, T]; a run of padding is a sequence too."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    found = begins.flatten().nonzero().flatten()
    end = torch.tensor([document_ids.numel()], device=found.device, dtype=found.dtype)
    return torch.cat([found, end]).int()
