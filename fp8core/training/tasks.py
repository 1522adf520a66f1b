"""What a task predicts: the loss of a micro-batch, and the figures of an evaluation.

Losses are sums of cross-entropies in nats, in fp32 whatever the logits are; the caller divides by
the number of targets, which makes accumulation over micro-batches of unequal size exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fp8core.data.batch import IGNORED, Batch
from fp8core.fusion.cross_entropy import SumOfCrossEntropies, plain_cross_entropy
from fp8core.training.ranks.world import World

__all__ = ["Task", "create_task"]


def create_task(name: str, *, class_count: int = 0) -> Task:
    """The task of the spec. ``class_count`` is for ``sequence_classification``."""
    if name == "causal_lm":
        return CausalLanguageModelling()
    if name == "masked_lm":
        return MaskedLanguageModelling()
    return SequenceClassification(class_count)


class Task(ABC):
    """Stateless for training; ``reset``, ``add`` and ``figures`` gather one evaluation."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._targets = 0
        self.cross_entropy: SumOfCrossEntropies = plain_cross_entropy
        """What sums up the losses; a fused one in the place of PyTorch's writes over the logits."""

    @abstractmethod
    def targets(self, batch: Batch) -> Tensor:
        """Labels aligned with the logits' rows, -100 where there is nothing to predict."""

    def target_count(self, batch: Batch) -> int:
        """How many predictions of ``batch`` count."""
        return int((self.targets(batch) != IGNORED).sum())

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """Sum of the cross-entropies over the targets: fp32, without dimensions."""
        return self.cross_entropy(logits, self.targets(batch))

    def reset(self) -> None:
        self._loss = 0.0
        self._targets = 0

    def add(self, logits: Tensor, batch: Batch) -> None:
        """Takes one evaluation batch into account."""
        self._loss += float(self.loss_sum(logits, batch).double())
        self._targets += self.target_count(batch)

    def add_up(self, world: World) -> None:
        """Puts the sums over all ranks into the place of this rank's."""
        self._loss, targets = world.total(self._loss, self._targets)
        self._targets = int(targets)

    def figures(self, text_bytes: int | None) -> dict[str, float]:
        """The figures of the evaluation, by metric name.

        ``text_bytes``: UTF-8 bytes of all that was predicted.
        """
        return {"eval/loss": self._loss / self._targets} if self._targets else {}


class CausalLanguageModelling(Task):
    """Predicts each next token of the same document."""

    def targets(self, batch: Batch) -> Tensor:
        # The labels move, not the logits: no copy of the largest tensor, and rows stay B * T.
        shifted = torch.full_like(batch.labels, IGNORED)
        shifted[:, :-1] = batch.labels[:, 1:]
        return shifted

    def figures(self, text_bytes: int | None) -> dict[str, float]:
        figures = super().figures(text_bytes)
        if figures and text_bytes:
            # Independent of the tokenizer, unlike the loss: bits of the whole text over its bytes.
            figures["eval/bits_per_byte"] = self._loss / math.log(2.0) / text_bytes
        return figures


class MaskedLanguageModelling(Task):
    """Predicts the tokens that were masked."""

    def targets(self, batch: Batch) -> Tensor:
        return batch.labels


class SequenceClassification(Task):
    """Predicts one class a sequence; evaluates accuracy and macro-averaged F1.

    F1 of a class is 2TP / (2TP + FP + FN); the macro average is over the classes that occur among
    labels or predictions.
    """

    def __init__(self, class_count: int) -> None:
        super().__init__()
        self._counts = torch.zeros(class_count, class_count, dtype=torch.int64)

    def targets(self, batch: Batch) -> Tensor:
        return batch.labels

    def reset(self) -> None:
        super().reset()
        self._counts.zero_()

    def add(self, logits: Tensor, batch: Batch) -> None:
        super().add(logits, batch)
        predicted = logits.float().argmax(-1).cpu()
        labels = batch.labels.cpu()
        counted = labels != IGNORED
        pairs = labels[counted] * self._counts.shape[0] + predicted[counted]
        self._counts += torch.bincount(pairs, minlength=self._counts.numel()).view_as(self._counts)

    def add_up(self, world: World) -> None:
        super().add_up(world)
        counts = world.total(*self._counts.flatten().tolist())
        self._counts = torch.tensor(counts).to(torch.int64).view_as(self._counts)

    def figures(self, text_bytes: int | None) -> dict[str, float]:
        figures = super().figures(text_bytes)
        if figures:
            right = self._counts.diagonal().double()
            of_class = (self._counts.sum(0) + self._counts.sum(1)).double()
            figures["eval/accuracy"] = float(right.sum() / self._counts.sum())
            occurs = of_class > 0
            figures["eval/macro_f1"] = float((2.0 * right[occurs] / of_class[occurs]).mean())
        return figures
