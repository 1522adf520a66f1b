"""One all-reduce of the gradients a step, after the last micro-batch.

Each rank has divided its losses by the targets of all ranks, so the sum over the ranks is the
gradient of the mean over all targets, whatever share of them a rank had. Gradients travel in the
order of the parameters, in pieces of a bounded size and in the format that the spec names; all
ranks receive the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8core.engines.gemm_watch import format_of
from fp8core.training.ranks.world import World

__all__ = ["GradientReducer"]

_BUCKET_ELEMENTS = 16 << 20
_IN_FLIGHT = 2


@dataclass(frozen=True)
class _Bucket:
    """Flat pieces of gradients that travel together."""

    pieces: list[Tensor]
    elements: int


class GradientReducer:
    """Adds up the gradients of ``parameters`` over ``world``, sent as ``dtype``."""

    def __init__(
        self,
        world: World,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        bucket_elements: int = _BUCKET_ELEMENTS,
    ) -> None:
        self._world = world
        self._parameters = parameters
        self._dtype = dtype
        self._bucket_elements = bucket_elements
        self.sent: dict[str, dict[str, int]] = {}
        """What this rank handed over in the last step, by format: ``bytes`` and ``elements``."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Replaces every ``.grad`` by its sum over the ranks.

        A parameter that only some ranks have a gradient of (an expert without tokens) counts as
        zero on the others; one that no rank has a gradient of keeps none.
        """
        self.sent = {}
        waiting: deque[tuple[_Bucket, Tensor, object]] = deque()
        for bucket in self._buckets(self._gradients()):
            buffer = self._filled(bucket)
            found = self.sent.setdefault(format_of(buffer), {"bytes": 0, "elements": 0})
            found["bytes"] += buffer.nbytes
            found["elements"] += buffer.numel()
            waiting.append((bucket, buffer, self._world.add_up(buffer, later=True)))
            if len(waiting) > _IN_FLIGHT:
                self._empty(*waiting.popleft())
        while waiting:
            self._empty(*waiting.popleft())

    def _gradients(self) -> list[Tensor]:
        flags = torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.uint8)
        there = self._world.union(flags).tolist()
        gradients = []
        for parameter, anywhere in zip(self._parameters, there, strict=True):
            if not anywhere:
                continue
            if parameter.grad is None:
                dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            gradients.append(parameter.grad)
        return gradients

    def _buckets(self, gradients: Sequence[Tensor]) -> list[_Bucket]:
        """In order, full ones but the last; a large gradient is cut."""
        buckets: list[_Bucket] = []
        pieces: list[Tensor] = []
        filled = 0
        for gradient in gradients:
            flat = gradient.view(-1)
            start = 0
            while start < flat.numel():
                end = min(flat.numel(), start + self._bucket_elements - filled)
                pieces.append(flat[start:end])
                filled += end - start
                start = end
                if filled == self._bucket_elements:
                    buckets.append(_Bucket(pieces, filled))
                    pieces, filled = [], 0
        if pieces:
            buckets.append(_Bucket(pieces, filled))
        return buckets

    def _filled(self, bucket: _Bucket) -> Tensor:
        """The bucket as one tensor; a single piece in the right format is sent where it lies."""
        if len(bucket.pieces) == 1:
            return bucket.pieces[0].to(self._dtype)
        buffer = torch.empty(bucket.elements, dtype=self._dtype, device=bucket.pieces[0].device)
        start = 0
        for piece in bucket.pieces:
            buffer[start : start + piece.numel()].copy_(piece)
            start += piece.numel()
        return buffer

    def _empty(self, bucket: _Bucket, buffer: Tensor, work: object) -> None:
        self._world.finish(work)  # type: ignore[arg-type]
        if buffer.data_ptr() == bucket.pieces[0].data_ptr():
            return
        start = 0
        for piece in bucket.pieces:
            piece.copy_(buffer[start : start + piece.numel()])
            start += piece.numel()
