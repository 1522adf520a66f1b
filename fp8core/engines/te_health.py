"""FP8 health on a GPU: what each layer's tensors lose to the cast, read with hooks when asked.

`cast_figures` says what is counted. The hooks only enqueue one small kernel for each tensor, so
that a recorded step costs little more than reading its tensors once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.engines.cast_figures import CastFigures, CastRule, ScaleFrom
from fp8core.engines.te_override import OperandUse

__all__ = ["HealthRecorder", "Rules", "cast_rules"]

Scales = Callable[[], Mapping[tuple[str, str], Tensor]]
"""The scales of the next casts by (layer, tensor), 0-dim fp32; none where made at the cast."""

Rules = Mapping[str, CastRule]
"""How those of input, weight and grad_output are cast that are cast at all."""


def cast_rules(recipe: Any) -> Rules:
    """The rules of a te recipe, for those tensors that some GEMM reads in FP8. Empty for scalings
    with blocks of 32 or 16: they need a GPU on which nobody has compared these figures yet."""
    hybrid = getattr(recipe, "fp8_format", "E4M3") == "HYBRID"
    formats = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2" if hybrid else "e4m3"}
    power_of_two = False
    if recipe.scaling == "delayed":
        sources = dict.fromkeys(formats, ScaleFrom.GIVEN)
    elif recipe.scaling == "current":
        sources = dict.fromkeys(formats, ScaleFrom.TENSOR)
        power_of_two = recipe.use_power_2_scales
    elif recipe.scaling == "block":
        dimensions = {
            "input": recipe.x_block_scaling_dim,
            "weight": recipe.w_block_scaling_dim,
            "grad_output": recipe.grad_block_scaling_dim,
        }
        blocks = {1: ScaleFrom.ROW_BLOCKS, 2: ScaleFrom.TILES}
        sources = {tensor: blocks[dimension] for tensor, dimension in dimensions.items()}
        power_of_two = not recipe.use_f32_scales
    else:
        return {}
    use = OperandUse.of(tuple(getattr(recipe, "override_linear_precision", (False,) * 3)))
    cast = {"input": use.input, "weight": use.weight, "grad_output": use.grad_output}
    if getattr(recipe, "backward_override", None) is not None:
        cast["grad_output"] = False
    return {
        tensor: CastRule.of(formats[tensor], source, power_of_two=power_of_two)
        for tensor, source in sources.items()
        if cast[tensor]
    }


class HealthRecorder:
    """Gathers the figures of input, weight and grad_output of each layer while recording is on."""

    def __init__(self, scales: Scales, rules: Rules) -> None:
        self._read_scales = scales
        self._rules = rules
        self._handles: list[Any] = []
        self._figures: CastFigures | None = None
        self._layers: tuple[str, ...] = ()
        self._scales: dict[tuple[str, str], Tensor] = {}
        self._on = False

    def record(self, enabled: bool, layers: Mapping[str, nn.Module]) -> None:
        """Begin anew with these layers, or end; what was gathered is forgotten."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._scales.clear()
        self._on = enabled and bool(self._rules) and bool(layers)
        if not self._on:
            return
        if self._figures is None or self._layers != tuple(layers):
            self._layers = tuple(layers)
            names = [f"fp8/{name}/{tensor}" for name in layers for tensor in self._rules]
            self._figures = CastFigures(names, next(iter(layers.values())).weight.device)  # type: ignore[arg-type]  # a Tensor
        self._figures.clear()
        self._handles += [
            layer.register_forward_hook(self._hook(name)) for name, layer in layers.items()
        ]

    def before_forward(self) -> None:
        """Keep the scales this micro-batch casts with; the update after it replaces them."""
        scales = self._read_scales() if self._on else {}
        if scales:
            # One copy of all of them: a kernel for each would cost more than the figures.
            kept = torch.stack(list(scales.values())).float().unbind()
            self._scales = dict(zip(scales, kept, strict=True))

    def read_later(self) -> Callable[[], dict[str, float]] | None:
        """A function that waits for what has been gathered; None while recording is off."""
        if not self._on or self._figures is None:
            return None
        return self._figures.read_later()

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            self._note(name, "input", inputs[0])
            self._note(name, "weight", module.weight)  # type: ignore[arg-type]  # a Tensor
            if output.requires_grad:
                output.register_hook(note_gradient)

        def note_gradient(gradient: Tensor) -> None:
            self._note(name, "grad_output", gradient)

        return hook

    def _note(self, name: str, tensor: str, value: Tensor) -> None:
        rule = self._rules.get(tensor)
        if not self._on or self._figures is None or rule is None:
            return
        scale = self._scales.get((name, tensor))
        if scale is None and rule.scale_from is ScaleFrom.GIVEN:
            # A layer of Transformer Engine has no state before its first pass: it begins at 1.
            scale = torch.ones((), dtype=torch.float32, device=value.device)
        self._figures.add(f"fp8/{name}/{tensor}", value, rule, scale)
