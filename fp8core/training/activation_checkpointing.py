"""Gradient checkpointing of transformers models, with the engine's own way to recompute."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fp8core.engines.protocol import Engine
from fp8core.errors import SpecRefused

__all__ = ["enable_gradient_checkpointing"]


def enable_gradient_checkpointing(
    model: nn.Module, engine: Engine, blocks: int | None = None
) -> None:
    """From now on ``model`` keeps only the inputs of its blocks, and recomputes the rest.

    ``blocks``: of so many alone, from the first on; the others keep what they need for their
    backward pass, which comes first. Raises ``SpecRefused`` for a model whose class cannot, or
    that has fewer blocks.
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
    if blocks is not None:
        _keep_all_of_the_others(model, blocks)
    function = engine.checkpoint_function()
    if function is None:
        return
    module: Any
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = function


def _keep_all_of_the_others(model: nn.Module, blocks: int) -> None:
    found = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if blocks > len(found):
        raise SpecRefused(
            f"{type(model).__name__} has {len(found)} blocks that can be recomputed one by one, "
            f"not {blocks}; leave it out to recompute all that it can",
            pointer="/training/recomputed_blocks",
        )
    for layer in found[blocks:]:
        layer.gradient_checkpointing = False
