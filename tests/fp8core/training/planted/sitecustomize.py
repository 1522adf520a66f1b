"""Read by the interpreter of a trainer under test: makes its second step fail as ``FAULT`` says.

The fault is planted in what computes the gradients, once the module that does it is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "fp8core.training.learner"
_STEP = 2


def beyond_the_card() -> None:
    """One allocation that no card can hold."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.empty(2 * total, dtype=torch.uint8, device="cuda")


def no_more_memory() -> None:
    """The process has its share of the card already: the step's own allocations find nothing."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)


def device_assert() -> None:
    """A row that the table does not have; nobody waits for the kernel that looks for it."""
    import torch

    table = torch.zeros(4, 8, device="cuda")
    torch.nn.functional.embedding(torch.tensor([99], device="cuda"), table)


def illegal_access() -> None:
    """A kernel that reads an address that is nobody's."""
    import torch

    source = "template <typename T> T stray(T x) { return x + *reinterpret_cast<volatile T*>(16); }"
    torch.cuda.jiterator._create_jit_fn(source)(torch.zeros(4, device="cuda"))


def host_memory() -> None:
    """The process may have 1 GiB more of address space, and asks for eight."""
    import torch

    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.empty(8 << 30, dtype=torch.uint8)


def killed_rank() -> None:
    """Rank 1 is gone without a word, while rank 0 waits for it in NCCL."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    _meet()


def absent_rank() -> None:
    """Rank 1 lives, and does not come to where rank 0 waits for it in NCCL."""
    if os.environ["RANK"] == "1":
        while True:
            time.sleep(60)
    _meet()


def _meet() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1 << 20, device="cuda"))
    torch.cuda.synchronize()


_FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        beyond_the_card,
        no_more_memory,
        device_assert,
        illegal_access,
        host_memory,
        killed_rank,
        absent_rank,
    )
}


class _Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the one module as everybody does, and changes it once it has been executed."""

    def __init__(self, fault: Callable[[], None]) -> None:
        self._fault = fault
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None
        self._loader, found.loader = found.loader, self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        learner: Any = module
        compute, fault = learner.Learner.gradients, self._fault

        def failing(self: Any, step: int, *arguments: Any, **options: Any) -> Any:
            if step == _STEP:
                print(f"step {step} is about to fail", file=sys.stderr, flush=True)
                fault()
            return compute(self, step, *arguments, **options)

        learner.Learner.gradients = failing


if "FAULT" in os.environ:
    sys.meta_path.insert(0, _Planting(_FAULTS[os.environ["FAULT"]]))
