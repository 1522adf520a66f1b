"""Gradient checkpointing of transformers models, with the engine's own way to recompute."""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8core.engines.protocol import Engine
from fp8core.errors import SpecRefused

__all__ = ["enable_gradient_checkpointing"]


def enable_gradient_checkpointing(model: nn.Module, engine: Engine) -> None:
    """From now on ``model`` keeps only the inputs of its blocks, and recomputes the rest.

    Raises ``SpecRefused`` for a model whose class cannot.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise SpecRefused(
            f"transformers cannot recompute the activations of {type(model).__name__}",
            pointer="/training/gradient_checkpointing",
        )
    # The newer name of the same; the older one warns where both are there.
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable
    # Reentrant checkpointing would drop the autocast and FP8 state of the forward pass.
    enable({"use_reentrant": False})
    function = engine.checkpoint_function()
    if function is None:
        return
    module: Any
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = function
