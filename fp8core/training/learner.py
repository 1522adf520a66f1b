"""A model in training, and the parts of one optimizer step: gradients, clipping, update.

Where several ranks train together, a step is that of all their micro-batches: each computes its
own, and before anything is judged, clipped or updated the gradients and the loss are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8core.data.batch import Batch
from fp8core.engines.protocol import Engine
from fp8core.errors import DataInvalid
from fp8core.spec.training import Training
from fp8core.training.forward import logits_of
from fp8core.training.optimizer import AdamW, clip_factor, global_norm
from fp8core.training.precision import dtype_of
from fp8core.training.ranks.gradients import GradientReducer
from fp8core.training.ranks.world import SOLO, World
from fp8core.training.schedule import learning_rate_factor
from fp8core.training.tasks import Task

__all__ = ["Learner", "StepTotals"]


@dataclass(frozen=True)
class StepTotals:
    """What the micro-batches of a step hold, over all ranks: predictions that count, and tokens."""

    targets: int
    tokens: int


class Learner:
    """A converted model with its engine, optimizer and task. Holds nothing between two steps."""

    def __init__(
        self,
        training: Training,
        model: nn.Module,
        engine: Engine,
        optimizer: AdamW,
        task: Task,
        world: World = SOLO,
    ) -> None:
        self.model = model
        self.engine = engine
        self.optimizer = optimizer
        self.task = task
        self._training = training
        self.world = world
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self.reducer: GradientReducer | None = None
        """Adds up the gradients of several ranks; None for one."""
        if world.several:
            format_sent = dtype_of(training.precision.communication)
            self.reducer = GradientReducer(world, self._trainable, format_sent)

    def totals(self, step: int, batches: Sequence[Batch]) -> StepTotals:
        """Counts the micro-batches of a step, over all ranks.

        Raises ``DataInvalid``, on every rank, where there is nothing to predict.
        """
        targets, tokens = self.world.total(
            sum(self.task.target_count(batch) for batch in batches),
            sum(batch.token_count for batch in batches),
        )
        if targets == 0:
            raise DataInvalid(
                f"step {step} has nothing to predict: every target lies beyond "
                f"{self._training.sequence_length} tokens or was left out",
                pointer="/training/sequence_length",
            )
        return StepTotals(int(targets), int(tokens))

    def gradients(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        totals: StepTotals | None = None,
        own: bool = False,
        before: Callable[[int], None] = lambda number: None,
        between: Callable[[int], bool] = lambda number: True,
    ) -> Tensor:
        """Forward and backward of every micro-batch; the loss (nats a target), fp32, 0-dim.

        The gradients are in ``.grad``, not yet unscaled or clipped, and like the loss those of all
        ranks together; ``own``: this rank's part of the sum alone. ``totals``: those of ``step``,
        where they are known already. ``before`` is called with the number of each micro-batch
        (from 1) before its forward pass, ``between`` between the two passes; where that says
        False, the step ends there (with ``own`` only, as the other ranks would wait).

        Raises ``DataInvalid`` where no micro-batch has anything to predict, and ``RankLost``.
        """
        if totals is None:
            totals = self.totals(step, batches)
        targets = torch.full((), totals.targets, dtype=torch.float32, device=self.engine.device)
        loss = self.forward_backward(batches, targets, before=before, between=between)
        if self.reducer is not None and not own:
            self.reducer.reduce()
            self.world.add_up(loss)
        return loss

    def forward_backward(
        self,
        batches: Sequence[Batch],
        targets: Tensor,
        *,
        before: Callable[[int], None] = lambda number: None,
        between: Callable[[int], bool] = lambda number: True,
    ) -> Tensor:
        """`gradients` of this rank alone, with nothing that waits for the device or reads numbers.

        ``targets``: how many predictions count over all ranks, fp32, 0-dim, on the device: in a
        CUDA graph a number would be that of the capture.
        """
        engine, task = self.engine, self.task
        # Kept casts of the weights cost memory, which a run that recomputes has none to spare of.
        keep_casts = len(batches) > 1 and not self._training.gradient_checkpointing
        scaler = engine.gradient_scaler
        loss = torch.zeros((), device=engine.device)
        for number, batch in enumerate(batches, start=1):
            before(number)
            there = batch.to(engine.device, non_blocking=True)
            with engine.training_context(number == 1 if keep_casts else None):
                share = task.loss_sum(logits_of(self.model, there, engine), there) / targets
            loss += share.detach()
            if not between(number):
                break
            (share if scaler is None else scaler.scale(share)).backward()
            engine.after_backward()
        return loss

    def gradient_norm(self) -> Tensor:
        """Unscales the gradients; the norm of all of them, before clipping, fp32, 0-dim."""
        if self.engine.gradient_scaler is not None:
            self.engine.gradient_scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        return global_norm(gradients)

    def learning_rate(self, step: int) -> float:
        factor = learning_rate_factor(self._training.schedule, step, self._training.steps)
        return self._training.optimizer.lr * factor

    def update(self, step: int, norm: Tensor, *, unless: Tensor | None = None) -> None:
        """The optimizer's step, with the learning rate of ``step``. Drops the gradients.

        ``norm``: that of the gradients, from `gradient_norm`. They count clipped to
        ``max_grad_norm``, which no pass over them writes back. ``unless``: where this 0-dim tensor
        is 1, nothing changes, without waiting for the device.
        """
        scaler = self.engine.gradient_scaler
        self.optimizer.set_learning_rate(self.learning_rate(step))
        longest = self._training.max_grad_norm
        factor = None if longest is None else clip_factor(norm, longest)
        if scaler is None:
            self.optimizer.step(factor=factor, unless=unless)
        else:
            # The scaler knows by itself of gradients that are not finite.
            scaler.step(self.optimizer, factor=factor)
            scaler.update()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
