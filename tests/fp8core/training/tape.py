"""A tape of operations: what stands in for a CUDA graph on a CPU.

Like a graph it repeats what was enqueued with the very tensors and numbers of its recording, so
that anything that the host ought to have said anew shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Tape", "taped"]


class Tape(TorchDispatchMode):
    """Records each operation, with its arguments and results.

    Before a replay all that any tape has made is overwritten, as graphs that share memory may do.
    """

    _all: ClassVar[weakref.WeakSet[Tape]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._known: set[int] = set()
        self._made: list[Tensor] = []
        self._all.add(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known |= {place for place, _ in _storages((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for place, storage in _storages(found):
            if place not in self._known:
                self._made.append(torch.empty(0, dtype=torch.uint8).set_(storage))
                self._known.add(place)
        self._calls.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        for tape in list(self._all):
            for made in tape._made:
                made.fill_(0xFF)  # a NaN, or -1
        for func, args, kwargs, before in self._calls:
            after = func(*args, **kwargs)
            for target, source in zip(tree_leaves(before), tree_leaves(after), strict=True):
                if isinstance(target, Tensor) and target.data_ptr() != source.data_ptr():
                    target.copy_(source)


def _storages(values: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.numel():
            yield value.untyped_storage().data_ptr(), value.untyped_storage()


def taped(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Unlike a graph it computes while it records; there is no FP8 state that this would change."""
    tape = Tape()
    with tape:
        result = compute()
    return tape.replay, result
