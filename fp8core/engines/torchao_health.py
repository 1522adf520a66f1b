"""FP8 health of torchao's layers, gathered inside their forward and backward passes.

Hooks are no way to it: compiled blocks do not call hooks that are added later. So the figures are
part of what is computed while recording is on. Those of the input are written into a tensor of the
layer; those of the output's gradient arrive as the gradient of a probe, a tensor that has no other
use. The weight's are computed from the Parameter when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.landing import Landing

__all__ = ["FIGURES", "LayerHealth", "Rule", "measure"]

FIGURES = ("amax", "scale", "saturated", "underflow")
_SMALLEST_AMAX = 1e-12  # torchao's lower limit


@dataclass(frozen=True)
class Rule:
    """How a tensor is cast: the format's largest number and smallest subnormal, and its scales."""

    largest: float
    smallest: float
    rowwise: bool
    power_of_two: bool

    @staticmethod
    def of(cast: Any, config: Any) -> Rule:
        """From torchao's ``CastConfig`` of the tensor, and the layer's ``Float8LinearConfig``."""
        info = torch.finfo(cast.target_dtype)
        return Rule(
            largest=info.max,
            smallest=info.smallest_normal * info.eps,
            rowwise=cast.scaling_granularity.value == "axiswise",
            power_of_two=config.round_scales_to_power_of_2,
        )


def measure(tensor: Tensor, rule: Rule) -> Tensor:
    """The `FIGURES` of the cast that reads ``tensor`` along its last dimension: fp32 ``[4]``."""
    magnitude = tensor.detach().abs().float()
    if rule.rowwise:
        amaxes = magnitude.amax(dim=-1, keepdim=True)
    else:
        amaxes = magnitude.amax()
    scales = rule.largest / amaxes.clamp(min=_SMALLEST_AMAX)
    if rule.power_of_two:
        scales = torch.exp2(torch.floor(torch.log2(scales)))
    scaled = magnitude * scales
    # The largest element may come out an ulp above the limit, which the cast rounds back to it.
    saturated = scaled > rule.largest * (1 + 2.0**-20)
    underflow = (magnitude > 0) & (scaled <= rule.smallest / 2)
    return torch.stack(
        [amaxes.amax(), scales.amin(), saturated.float().mean(), underflow.float().mean()]
    )


class LayerHealth:
    """The figures of one layer. A layer used several times in a pass has no gradient figures."""

    def __init__(self, device: torch.device) -> None:
        self._input = torch.zeros(len(FIGURES), device=device)
        # One more than the figures: it counts the gradients that were added up.
        self._probe = torch.zeros(len(FIGURES) + 1, device=device, requires_grad=True)

    def clear(self) -> None:
        self._input.zero_()
        self._probe.grad = None

    def watch(self, input: Tensor, output: Tensor, config: Any) -> Tensor:
        """``output`` unchanged, noting ``input``'s figures and, later, its gradient's."""
        if not torch.is_grad_enabled():
            return output
        with torch.no_grad():
            self._input.copy_(measure(input, Rule.of(config.cast_config_input, config)))
        rule = Rule.of(config.cast_config_grad_output, config)
        watched: Tensor = _GradientProbe.apply(output, self._probe, rule)
        return watched

    @staticmethod
    def read_later(layers: Mapping[str, Any], config: Any) -> Callable[[], dict[str, float]]:
        """A function that waits for ``fp8/<layer>/<tensor>/<figure>`` of ``layers`` that ran."""
        names: list[tuple[str, str]] = []
        rows: list[Tensor] = []
        counts: list[Tensor] = []
        rule = Rule.of(config.cast_config_weight, config)
        for name, layer in layers.items():
            health: LayerHealth = layer.health
            one = torch.ones((), device=health._input.device)
            names.append((name, "input"))
            rows.append(health._input)
            counts.append((health._input[1] > 0).float())
            names.append((name, "weight"))
            rows.append(measure(layer.weight, rule))
            counts.append(one * counts[-1])
            if health._probe.grad is not None:
                names.append((name, "grad_output"))
                rows.append(health._probe.grad[:-1])
                counts.append(health._probe.grad[-1])
        if not rows:
            return dict
        landing = Landing([torch.stack(rows), torch.stack(counts)])

        def read() -> dict[str, float]:
            values, ran = (tensor.tolist() for tensor in landing.wait())
            return {
                f"fp8/{name}/{tensor}/{figure}": value
                for (name, tensor), row, count in zip(names, values, ran, strict=True)
                if count == 1
                for figure, value in zip(FIGURES, row, strict=True)
            }

        return read


class _GradientProbe(torch.autograd.Function):
    """The identity on ``output``; the gradient's figures, and a 1, become the probe's gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, probe: Tensor, rule: Rule) -> Tensor:
        ctx.rule = rule
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        figures = measure(gradient, ctx.rule)
        return gradient, torch.cat([figures, figures.new_ones(1)]), None
