"""FP8 health of torchao's layers, gathered inside their forward and backward passes.

Hooks are no way to it: compiled blocks do not call hooks that are added later. So the figures are
part of what is computed while recording is on. Those of the input are written into a tensor of the
layer; those of the output's gradient arrive as the gradient of a probe, a tensor that has no other
use. The weight's are counted from the Parameter when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8core.engines.cast_figures import FIGURES, CastFigures, CastRule, ScaleFrom
from fp8core.numerics.landing import Landing

__all__ = ["HealthReader", "LayerHealth", "Rule", "measure"]

_SMALLEST_AMAX = 1e-12  # torchao's lower limit
_MEASURED = len(FIGURES) + 1


@dataclass(frozen=True)
class Rule:
    """How a tensor is cast: the format's largest number and smallest subnormal, and its scales."""

    largest: float
    smallest: float
    rowwise: bool
    power_of_two: bool

    def as_cast_rule(self) -> CastRule:
        """For tensors that are not measured inside of compiled code."""
        return CastRule(
            largest=self.largest,
            vanishing=self.smallest / 2,
            scale_from=ScaleFrom.ROWS if self.rowwise else ScaleFrom.TENSOR,
            power_of_two=self.power_of_two,
            smallest_amax=_SMALLEST_AMAX,
        )

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
    """The `FIGURES` of the cast that reads ``tensor`` along its last dimension, and a 1 behind
    them: fp32 ``[5]``.

    Compiled, this is to add few kernels to those of the pass. The amax is written as torchao writes
    it, so that of both one is left. The counts of rows come out of the kernel that casts, and all
    else out of one sum along them, in which the compiler puts many tensors' together.
    """
    tensor = tensor.detach()
    if rule.rowwise:
        amaxes = torch.amax(torch.abs(tensor), dim=-1, keepdim=True)
        amax = amaxes.amax().float()
    else:
        amaxes = torch.max(torch.abs(tensor))
        amax = amaxes.float()
    magnitude = torch.abs(tensor).float()
    scaled = magnitude * _scales(amaxes.float(), rule)
    # Compiled code may count what it has not yet rounded to bf16, as the amax was. The largest
    # element then lies up to an ulp of bf16 above the limit, and the cast rounds it back to that.
    saturated = (scaled > rule.largest * (1 + 2.0**-7)).float().sum(dim=-1).flatten()
    underflow = ((magnitude > 0) & (scaled <= rule.smallest / 2)).float().sum(dim=-1).flatten()
    place = torch.arange(_MEASURED, device=tensor.device).unsqueeze(1)
    first = torch.arange(saturated.numel(), device=tensor.device) == 0
    # The least scale is that of the largest amax.
    known = torch.where(place == 0, amax, torch.where(place == 1, _scales(amax, rule), 1.0))
    counted = torch.where(place == 2, saturated, underflow)
    is_count = (place == 2) | (place == 3)
    sums = torch.where(is_count, counted, torch.where(first, known, 0.0)).sum(dim=1)
    return torch.where(is_count.flatten(), sums / tensor.numel(), sums)


def _scales(amaxes: Tensor, rule: Rule) -> Tensor:
    scales = rule.largest / amaxes.clamp(min=_SMALLEST_AMAX)
    return torch.exp2(torch.floor(torch.log2(scales))) if rule.power_of_two else scales


class LayerHealth:
    """The figures of one layer. A layer used several times in a pass has no gradient figures."""

    def __init__(self, device: torch.device) -> None:
        self.input = torch.zeros(_MEASURED, device=device)
        # What stands behind the figures counts the gradients that were added up.
        self._probe = torch.zeros(_MEASURED, device=device, requires_grad=True)

    @staticmethod
    def clear(layers: Iterable[LayerHealth]) -> None:
        """Forgets what ``layers`` hold, of one device, in one launch."""
        inputs = []
        for layer in layers:
            inputs.append(layer.input)
            layer._probe.grad = None
        if inputs:
            torch._foreach_zero_(inputs)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient's figures, and how many gradients were added up: fp32 ``[5]``."""
        return self._probe.grad

    def watch(self, input: Tensor, output: Tensor, config: Any) -> Tensor:
        """``output`` unchanged, noting ``input``'s figures and, later, its gradient's."""
        if not torch.is_grad_enabled():
            return output
        with torch.no_grad():
            self.input.copy_(measure(input, Rule.of(config.cast_config_input, config)))
        rule = Rule.of(config.cast_config_grad_output, config)
        watched: Tensor = _GradientProbe.apply(output, self._probe, rule)
        return watched


class HealthReader:
    """Reads the figures of all layers of an engine at once, with few launches."""

    def __init__(self, layers: Mapping[str, Any], config: Any) -> None:
        self._layers = dict(layers)
        self._weight_rule = Rule.of(config.cast_config_weight, config).as_cast_rule()
        names = [f"fp8/{name}/weight" for name in layers]
        device = next(iter(layers.values())).weight.device if layers else torch.device("cpu")
        self._weights = CastFigures(names, device)

    @property
    def layers(self) -> list[str]:
        return list(self._layers)

    def read_later(self) -> Callable[[], dict[str, float]]:
        """A function that waits for ``fp8/<layer>/<tensor>/<figure>`` of layers that ran."""
        if not self._layers:
            return dict
        health: dict[str, LayerHealth] = {n: layer.health for n, layer in self._layers.items()}
        self._weights.clear()
        self._weights.add_all(
            {f"fp8/{name}/weight": layer.weight for name, layer in self._layers.items()},
            self._weight_rule,
        )
        read_weights = self._weights.read_later()
        probes = {n: h.gradient for n, h in health.items() if h.gradient is not None}
        landing = Landing(
            [
                torch.stack([one.input for one in health.values()]),
                *([torch.stack(list(probes.values()))] if probes else []),
            ]
        )

        def read() -> dict[str, float]:
            inputs, *gradients = (tensor.tolist() for tensor in landing.wait())
            weights = read_weights()
            figures: dict[str, float] = {}
            for name, (*row, ran) in zip(health, inputs, strict=True):
                if not ran:
                    continue
                figures |= _named(name, "input", row)
                for figure in FIGURES:
                    key = f"fp8/{name}/weight/{figure}"
                    figures[key] = weights[key]
            for name, (*row, count) in zip(probes, gradients[0] if gradients else (), strict=True):
                if count == 1:
                    figures |= _named(name, "grad_output", row)
            return figures

        return read


def _named(name: str, tensor: str, row: list[float]) -> dict[str, float]:
    return {f"fp8/{name}/{tensor}/{f}": value for f, value in zip(FIGURES, row, strict=True)}


class _GradientProbe(torch.autograd.Function):
    """The identity on ``output``; what `measure` gives of its gradient becomes the probe's."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, probe: Tensor, rule: Rule) -> Tensor:
        ctx.rule = rule
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        # As torchao casts it: of other shapes the compiler would not see that the amax is the same.
        as_cast = gradient.reshape(-1, gradient.shape[-1])
        return gradient, measure(as_cast, ctx.rule), None
