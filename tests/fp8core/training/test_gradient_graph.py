"""One graph of gradients: what it is replayed on, what it has room for, a capture that fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.data.batch import IGNORED, Batch
from fp8core.fusion.sequences import Sequences, document_bounds
from fp8core.training import gradient_graph
from fp8core.training.gradient_graph import GradientGraph, shape_of
from fp8core.training.learner import Learner
from tests.fp8core.training.graphed import batch, graphs, learner
from tests.fp8core.training.tape import taped

__all__ = ["graphs", "learner"]  # fixtures


def gradients_of(learner: Learner) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None}
    learner.drop_gradients()
    return found


def test_replayed_gradients_are_those_of_each_batch(learner: Learner) -> None:
    first = batch(0, 3)
    graph = GradientGraph(learner, first, taped)
    for seed, documents in ((0, 3), (1, 1), (2, 20), (3, 7)):
        given = batch(seed, documents)
        totals = learner.totals(1, [given])
        loss = graph.gradients(given, totals.targets).clone()
        found = gradients_of(learner)
        expected = learner.gradients(1, [given], totals=totals)
        assert torch.equal(loss, expected), documents
        of_batch = gradients_of(learner)
        assert found.keys() == of_batch.keys()
        for name, gradient in of_batch.items():
            assert torch.equal(found[name], gradient), (documents, name)
    assert torch.equal(first.input_ids, batch(0, 3).input_ids), "it is read, and not written to"


def test_padded_rows_are_replayed_whatever_their_padding(learner: Learner) -> None:
    def padded(seed: int, *lengths: int) -> Batch:
        whole = batch(seed, 1)
        real = torch.arange(64) < torch.tensor(lengths)[:, None]
        labels = whole.labels.masked_fill(~real, IGNORED)
        count = int((labels != IGNORED).sum())
        return replace(
            whole,
            labels=labels,
            attention_mask=real,
            target_count=count,
            document_bounds=document_bounds(real),
        )

    graph = GradientGraph(learner, padded(0, 64, 50), taped)
    for seed, lengths in ((1, (64, 50)), (2, (30, 41)), (3, (64, 64))):
        given = padded(seed, *lengths)
        totals = learner.totals(1, [given])
        loss = graph.gradients(given, totals.targets).clone()
        found = gradients_of(learner)
        assert torch.equal(loss, learner.gradients(1, [given], totals=totals)), lengths
        for name, gradient in gradients_of(learner).items():
            assert torch.equal(found[name], gradient), (lengths, name)


def test_room_is_for_twice_the_documents_of_the_first_batch(learner: Learner) -> None:
    graph = GradientGraph(learner, batch(0, 20), taped)
    assert graph.room == 80
    assert graph.has_room_for(batch(0, 40))
    assert not graph.has_room_for(batch(0, 41))


def test_whole_rows_and_documents_are_two_shapes() -> None:
    assert shape_of(batch(0, 1)) == ((2, 64), False)
    assert shape_of(batch(0, 2)) == ((2, 64), True)
    assert shape_of(batch(0, 2, length=32)) == ((2, 32), True)
    ahead = batch(0, 2)
    object.__setattr__(ahead, "causal", False)
    assert shape_of(ahead) is None
    object.__setattr__(ahead, "causal", True)
    object.__setattr__(ahead, "document_bounds", None)
    assert shape_of(ahead) is None


@pytest.mark.parametrize("ended", [False, True])
def test_a_capture_that_was_not_ended_is_ended_and_its_memory_given_back_once(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, Any]] = []

    def end(device: int, pool: Any) -> None:
        if ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        calls.append(("end", device, pool))

    def release(device: int, pool: Any) -> None:
        calls.append(("release", device, pool))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release)
    gradient_graph._let_go(1, (0, 7))
    # The memory of one that was ended goes with its graph.
    assert calls == ([] if ended else [("end", 1, (0, 7)), ("release", 1, (0, 7))])


def test_bounds_with_room_show_the_same_sequences() -> None:
    given = batch(0, 5)
    assert given.document_bounds is not None
    bounds = torch.cat([given.document_bounds, given.document_bounds[-1:].expand(9)])
    own, padded = Sequences(2, 64, given.document_bounds), Sequences(2, 64, bounds)
    there = torch.device("cpu")
    assert torch.equal(own.positions(there), padded.positions(there))
    assert torch.equal(own.mask(there), padded.mask(there))
