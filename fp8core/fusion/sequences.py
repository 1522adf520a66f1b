"""How the tokens of a micro-batch fall into sequences, for attention that knows no masks.

A causal block needs no mask of shape [T, T]: it is enough to know where each sequence begins. A row
that is padded at its end is one sequence all the same, as no token looks ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.data.batch import Batch

__all__ = ["Sequences"]


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
    def of(cls, batch: Batch) -> Sequences | None:
        """Those of a batch of a causal model; None where its documents may be looked at ahead."""
        rows, length = batch.input_ids.shape
        if not batch.packed:
            return cls(rows, length)
        if not batch.causal:
            return None
        bounds = batch.document_bounds
        if bounds is None:
            bounds = document_bounds(batch.document_ids)
        return cls(rows, length, None if bounds.numel() - 1 == rows else bounds)

    def mask(self, device: torch.device, window: int | None = None) -> Tensor:
        """[B, 1, T, T] bool: who sees whom, of the last ``window`` tokens (itself included)."""
        places = torch.arange(self.length, device=device)
        distance = places[:, None] - places[None, :]
        allowed = distance >= 0
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
