"""A checkpoint's copy on a GPU: as the tensors were at its place in the queue, without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.training.host_copy import HostCopy, bytes_of_copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_copy_is_of_its_place_in_the_queue_and_the_host_does_not_wait() -> None:
    copy = HostCopy()
    weight = torch.zeros(1 << 20, device="cuda")
    moments = torch.arange(6.0, device="cuda").reshape(2, 3).t()
    live = {"model": {"w": weight}, "optimizer": {"m": moments, "updates": torch.tensor(7)}}
    copy.take(live)()  # page-locks the memory, which waits
    torch.cuda._sleep(1 << 32)  # type: ignore[no-untyped-call]  # seconds of work
    weight.fill_(1.0)
    arrived = copy.take(live)
    weight.fill_(2.0)
    moments.zero_()
    stream: Any = torch.cuda.current_stream()
    assert not stream.query()
    found = arrived()
    assert found["model"]["w"].is_pinned()
    assert bool((found["model"]["w"] == 1.0).all())
    assert found["optimizer"]["m"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["optimizer"]["updates"].item() == 7
    torch.cuda.synchronize()
    assert bool((weight == 2.0).all())


def test_page_locked_blocks_are_counted_as_they_are_given() -> None:
    tensors = {"model": {"w": torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")}}
    assert bytes_of_copy(tensors) == 4 << 20
