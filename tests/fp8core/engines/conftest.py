"""Engines and layers as the tests of this folder want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.engines.emulated import EmulatedEngine
from fp8core.spec.recipe import EmulatedCurrent, EmulatedDelayed

torch.set_num_threads(2)


@pytest.fixture
def delayed() -> Callable[..., EmulatedEngine]:
    """Makes an emulated engine with delayed scaling on the CPU; ``autocast=None`` for none."""

    def make(autocast: torch.dtype | None = torch.bfloat16, **fields: Any) -> EmulatedEngine:
        recipe = EmulatedDelayed(engine="emulated", **fields)
        return EmulatedEngine(recipe, torch.device("cpu"), autocast)

    return make


@pytest.fixture
def current() -> Callable[..., EmulatedEngine]:
    """The same with current scaling."""

    def make(autocast: torch.dtype | None = torch.bfloat16, **fields: Any) -> EmulatedEngine:
        recipe = EmulatedCurrent(engine="emulated", scaling="current", **fields)
        return EmulatedEngine(recipe, torch.device("cpu"), autocast)

    return make
