"""Forward and backward of one micro-batch as a CUDA graph, replayed on the tokens of each step.

A graph holds addresses and the numbers of the host as they were when it was captured. So the tokens
are copied to where the graph reads them, the number of targets is a tensor, and the bounds of
documents have room for more documents than there are: those left over are empty. The gradients come
out in the same memory each time. The norm, the clipping and the update are no part of the graph:
they are a few launches, which the host enqueues while the graph runs, and what they take from it
(learning rate, number of the step, seeds) changes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8core.data.batch import Batch
from fp8core.fusion.sequences import Sequences
from fp8core.training.learner import Learner

__all__ = ["Capture", "GradientGraph", "Shape", "capturing", "shape_of"]

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Takes what enqueues work and returns a tensor; gives what repeats the work, and the tensor.

Nothing of it is computed yet. Raises what the device or the work fails with; the device computes on
as before then.
"""

Shape = tuple[tuple[int, ...], bool]
"""Rows and length of a batch, and whether its rows hold several documents."""

_LEAST_ROOM = 64


def capturing() -> Capture:
    """What captures graphs that are never replayed at once, in memory that they share."""
    pool: list[Any] = []

    def capture(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if not pool:
            pool.append(torch.cuda.graph_pool_handle())
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # What the collector finds in the midst of a capture may free what CUDA frees by itself,
        # graphs of before for instance, and end the capture by that.
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            # Other threads copy and wait meanwhile (checkpoints), which must not end the capture.
            with torch.cuda.graph(graph, pool=pool[0], capture_error_mode="thread_local"):
                result = compute()
        except BaseException:
            # What failed leaves its stream the current one, and random numbers those of the
            # capture.
            torch.cuda.set_stream(stream)
            generator = torch.cuda.default_generators[stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
            _let_go(stream.device_index, pool[0])
            raise
        finally:
            if collecting:
                gc.enable()
        return graph.replay, result

    return capture


def _let_go(device: int, pool: Any) -> None:
    """Ends a capture that PyTorch could not end, and gives its memory back.

    Such a one stays open for the allocator: its memory is nobody's then, and nothing that is cached
    is freed any more where the device has no more memory.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # it was ended, and its memory goes with its graph
    torch._C._cuda_releasePool(device, pool)


def shape_of(batch: Batch) -> Shape | None:
    """What a graph must be captured for; None where ``batch`` is not one that a graph can take."""
    if batch.packed and batch.document_bounds is None:
        return None  # they would be counted on the device, for which the host waits
    sequences = Sequences.of(batch)
    if sequences is None:
        return None
    return tuple(batch.input_ids.shape), sequences.bounds is not None


class GradientGraph:
    """The graph of the gradients of batches shaped like ``batch``; captures it.

    ``before`` is called ahead of the pass, as part of it. Everything that is made at a first use
    must have been used before. The captured pass is counted
    by the engine as one that was computed: the next `gradients` computes it.
    """

    def __init__(
        self,
        learner: Learner,
        batch: Batch,
        capture: Capture,
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        shape = shape_of(batch)
        if shape is None:
            raise ValueError("no graph can take the batch")
        self.room: int | None = None
        """For so many documents; None: each row is one sequence."""
        if shape[1]:
            self.room = max(_LEAST_ROOM, 2 * _documents(batch))
        device = learner.engine.device
        self._inputs = _copied(_padded(batch, self.room), device)
        self._targets = torch.ones((), dtype=torch.float32, device=device)
        learner.drop_gradients()
        self._replay, self._loss = capture(
            lambda: learner.forward_backward([self._inputs], self._targets, before=before)
        )
        self._gradients = [
            (parameter, parameter.grad)
            for parameter in learner.model.parameters()
            if parameter.grad is not None
        ]
        learner.drop_gradients()

    def has_room_for(self, batch: Batch) -> bool:
        return self.room is None or _documents(batch) <= self.room

    def gradients(self, batch: Batch, targets: int) -> Tensor:
        """As `Learner.gradients` of this one micro-batch. The loss holds until the next call."""
        pairs = zip(_tensors(_padded(batch, self.room)), _tensors(self._inputs), strict=True)
        for source, target in pairs:
            # From pageable memory the copy would wait for all that the device has to do before it.
            ready = source.pin_memory() if target.is_cuda else source
            target.copy_(ready, non_blocking=True)
        self._targets.fill_(targets)
        self._replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss


def _documents(batch: Batch) -> int:
    assert batch.document_bounds is not None
    return batch.document_bounds.numel() - 1


def _padded(batch: Batch, room: int | None) -> Batch:
    """With bounds for ``room`` documents, the last ones empty; None: bounds are not read.

    Those of padded rows, as many as the batch makes, are left away.
    """
    bounds = batch.document_bounds
    if not batch.packed:
        return replace(batch, document_bounds=None)
    if room is None or bounds is None:
        return batch
    more = bounds[-1:].expand(room + 1 - bounds.numel())
    return replace(batch, document_bounds=torch.cat([bounds, more]))


def _copied(batch: Batch, device: torch.device) -> Batch:
    """In memory of its own, which later batches are written to."""
    there = batch.to(device)
    mask, bounds = there.attention_mask, there.document_bounds
    return replace(
        there,
        input_ids=there.input_ids.clone(),
        labels=there.labels.clone(),
        attention_mask=None if mask is None else mask.clone(),
        position_ids=there.position_ids.clone(),
        document_ids=there.document_ids.clone(),
        document_bounds=None if bounds is None else bounds.clone(),
    )


def _tensors(batch: Batch) -> list[Tensor]:
    found = [batch.input_ids, batch.labels, batch.position_ids, batch.document_ids]
    more = (batch.attention_mask, batch.document_bounds)
    return [*found, *(tensor for tensor in more if tensor is not None)]
