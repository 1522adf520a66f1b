"""The torchao engine on a CPU, its compiler emptied between tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fp8core.engines.torchao_engine import TorchaoEngine
from fp8core.spec.recipe import TorchaoRecipe

__all__ = ["CPU", "Make", "engine", "nothing_compiled"]

CPU = torch.device("cpu")
Make = Callable[..., TorchaoEngine]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def engine() -> Make:
    def make(backend: str | None = None, **fields: Any) -> TorchaoEngine:
        return TorchaoEngine(TorchaoRecipe(engine="torchao", **fields), CPU, backend)

    return make
