"""Training and evaluation mode for as long as something is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["in_evaluation", "in_training"]


@contextmanager
def in_training(module: nn.Module) -> Iterator[None]:
    with _kept(module):
        module.train()
        yield


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    with _kept(module):
        module.eval()
        yield


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Gives each module within its own mode back: a part may be in another one than the whole."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
