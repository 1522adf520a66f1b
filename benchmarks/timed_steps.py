"""Plain steps of an optimizer, each by the clock with the device waited for at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from fp8core.engines import Engine

__all__ = ["gib", "timed_steps"]

WARM_UP = 3


def timed_steps(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    loss_of_step: Callable[[], Tensor],
    steps: int,
) -> tuple[list[float], float | None, float]:
    """Milliseconds of ``steps`` steps behind ``WARM_UP``, the peak of allocated GiB (None on a
    CPU), and the last loss. ``loss_of_step`` goes forward, within the engine's context."""
    on_gpu = engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    milliseconds, loss = [], torch.zeros(())
    for _ in range(WARM_UP + steps):
        _wait(on_gpu)
        began = time.perf_counter()
        with engine.training_context():
            loss = loss_of_step()
        loss.backward()
        engine.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(on_gpu)
        milliseconds.append(1000 * (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return milliseconds[WARM_UP:], peak, float(loss.detach())


def gib(peak: float | None) -> str:
    return "memory not measured" if peak is None else f"{peak:.2f} GiB"


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
