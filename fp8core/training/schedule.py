"""The learning rate over the steps of a run."""

from __future__ import annotations

import math

from fp8core.spec.training import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    WarmupStableDecaySchedule,
)

__all__ = ["AnySchedule", "learning_rate_factor"]

AnySchedule = ConstantSchedule | LinearSchedule | CosineSchedule | WarmupStableDecaySchedule


def learning_rate_factor(schedule: AnySchedule, step: int, total_steps: int) -> float:
    """What the peak learning rate is multiplied by at ``step``, counted from 1 to ``total_steps``.

    Warm-up rises in equal parts and reaches 1 at step ``warmup_steps``; the decay begins there (for
    ``warmup_stable_decay`` at ``total_steps - decay_steps``) and reaches ``final_lr_ratio`` at the
    last step. Cosine: ``final + (1 - final) * (1 + cos(pi * p)) / 2`` with ``p`` the share of the
    decay that has passed (Loshchilov and Hutter, SGDR, arXiv:1608.03983, equation 5).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return step / warmup
    if isinstance(schedule, ConstantSchedule):
        return 1.0
    start = warmup
    if isinstance(schedule, WarmupStableDecaySchedule):
        start = total_steps - schedule.decay_steps
    passed = min(max((step - start) / max(1, total_steps - start), 0.0), 1.0)
    final = schedule.final_lr_ratio
    if isinstance(schedule, CosineSchedule):
        return final + (1.0 - final) * (1.0 + math.cos(math.pi * passed)) / 2.0
    return 1.0 + (final - 1.0) * passed
