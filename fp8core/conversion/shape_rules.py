"""What an engine takes by shape alone, for planning on a machine that cannot run it."""

from __future__ import annotations

import torch
from torch import nn

from fp8core.conversion.decide import Refusals
from fp8core.engines import availability, create
from fp8core.engines.protocol import NormDescription
from fp8core.engines.te_recipe import feature_multiple
from fp8core.spec import Recipe, TorchaoRecipe

__all__ = ["shape_rules"]


def shape_rules(recipe: Recipe) -> Refusals:
    """The refusals of ``recipe``'s engine: its own where it runs on a CPU, else its shape rules."""
    cpu = torch.device("cpu")
    if availability(recipe, cpu).ok:
        return create(recipe, cpu)
    return _ShapeRules(recipe)


class _ShapeRules:
    """Of Transformer Engine (its ``assert_dim_for_fp8_exec`` and norm classes) and torchao."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._multiple = feature_multiple(recipe)

    def linear_refusal(self, linear: nn.Linear) -> str | None:
        if all(getattr(self._recipe, "override_linear_precision", (False,))):
            return "override_linear_precision keeps all three GEMMs in high precision"
        for side in ("in_features", "out_features"):
            size = getattr(linear, side)
            if size % self._multiple:
                return f"{side} {size} is not a multiple of {self._multiple}"
        return None

    def norm_refusal(self, norm: NormDescription) -> str | None:
        if isinstance(self._recipe, TorchaoRecipe):
            return "torchao converts Linear layers only"
        if norm.weight is None:
            return "Transformer Engine's norms always have a weight; this one has none"
        if norm.kind == "layer_norm" and norm.bias is None:
            return "te.LayerNorm always has a bias; this norm has none"
        if norm.kind == "rms_norm" and norm.bias is not None:
            return "te.RMSNorm has no bias; this norm has one"
        return None
