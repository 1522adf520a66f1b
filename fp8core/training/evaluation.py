"""One evaluation of a model on the held-out batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from fp8core.data.batch import Batch
from fp8core.data.prefetch import WaitInterrupted
from fp8core.engines.protocol import Engine
from fp8core.training.forward import logits_of
from fp8core.training.ranks.world import SOLO, World
from fp8core.training.tasks import Task

__all__ = ["evaluate"]


def evaluate(
    model: nn.Module,
    engine: Engine,
    task: Task,
    batches: Iterable[Batch],
    *,
    text_bytes: Callable[[], int | None],
    world: World = SOLO,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """The figures of ``task`` over ``batches``; None when ``interrupted`` said so behind one.

    ``batches`` may break off the wait for one where ``interrupted`` would say so. ``text_bytes``:
    the UTF-8 bytes of all targets, asked for when all batches were seen. Of several ranks each
    takes its share, as many batches as every other; all get the figures of the whole, and
    ``interrupted`` must answer all of them alike.
    Leaves the model in training mode and every FP8 state as it was, and draws no random number.
    """
    task.reset()
    model.eval()
    try:
        with torch.no_grad():
            left = iter(batches)
            while True:
                try:
                    batch = next(left, None)
                except WaitInterrupted:
                    batch = None
                # Asked behind each, the end too: where one rank waits in vain, others do not.
                if interrupted():
                    return None
                if batch is None:
                    break
                there = batch.to(engine.device, non_blocking=True)
                with engine.evaluation_context():
                    logits = logits_of(model, there, engine)
                task.add(logits, there)
    finally:
        model.train()
    task.add_up(world)
    return task.figures(text_bytes())
