"""A checkpoint's copy on a GPU: as the tensors were at its place in the queue, without waiting."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import pytest
import torch

from fp8core.training import host_room
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


def test_a_copy_takes_no_more_page_locked_memory_than_its_tensors() -> None:
    tensors = {
        "model": {f"w{n}": torch.full(((1 << 20) + 1,), n, device="cuda") for n in range(8)},
        "optimizer": {"updates": torch.tensor(7)},
    }
    size = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
    copy = HostCopy()
    found = copy.take(tensors)()
    assert bytes_of_copy(tensors) < size + 64 * 9
    places = [tensor for named in found.values() for tensor in named.values()]
    assert all(tensor.is_pinned() for tensor in places)
    begin = min(tensor.data_ptr() for tensor in places)
    assert max(tensor.data_ptr() + tensor.nbytes for tensor in places) <= begin + size + 64 * 9
    assert [int(found["model"][f"w{n}"][-1]) for n in range(8)] == list(range(8))
    # It is unlocked when nothing uses it any more.
    del copy
    gc.collect()
    assert not any(tensor.is_pinned() for tensor in places)
    assert int(found["model"]["w7"].sum()) == 7 * ((1 << 20) + 1)


def test_what_cannot_be_page_locked_is_told_and_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.ones(1 << 10, device="cuda")
    # More than is mapped there.
    monkeypatch.setattr(host_room, "_ALIGNMENT", 1 << 46)
    real = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda _, size, **more: real(-1, 1 << 16, **more))
    with pytest.raises(RuntimeError, match="cannot be page-locked: CUDA error"):
        HostCopy().take({"model": {"w": weight}})
    assert float((weight + 1).sum()) == 2 << 10
