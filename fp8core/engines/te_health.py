"""FP8 health on a GPU: what each layer's tensors lose to the cast, read with hooks when asked.

A tensor's figures follow from the values before the cast and the scale applied to them: an
element saturates where ``|x * scale|`` exceeds the format's maximum, and underflows where it is
non-zero and ``|x * scale|`` is at most half of the smallest subnormal, which round-to-nearest-even
sends to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_UNDERFLOW = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}

Scales = Callable[[], Mapping[tuple[str, str], Tensor]]
"""The scales of the next casts by (layer, tensor), 0-dim fp32; none where made at the cast."""


class HealthRecorder:
    """Gathers amax, scale, saturated and underflow of input, weight and grad_output per layer."""

    def __init__(self, scales: Scales) -> None:
        self._read_scales = scales
        self._handles: list[Any] = []
        self._figures: dict[str, Tensor] = {}
        self._scales: dict[tuple[str, str], Tensor] = {}
        self._layers: Mapping[str, nn.Module] = {}
        self._backward_format = "e4m3"

    def record(self, enabled: bool, layers: Mapping[str, nn.Module], *, hybrid: bool) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._figures.clear()
        self._scales.clear()
        self._layers = layers if enabled else {}
        self._backward_format = "e5m2" if hybrid else "e4m3"
        if enabled:
            for name, layer in layers.items():
                self._handles.append(layer.register_forward_hook(self._hook(name)))

    def before_forward(self) -> None:
        """Keep the scales this micro-batch casts with; the update after it replaces them."""
        scales = self._read_scales() if self._layers else {}
        if scales:
            # One copy of all of them: a kernel for each would cost more than the figures.
            kept = torch.stack(list(scales.values())).unbind()
            self._scales = dict(zip(scales, kept, strict=True))

    def gathered(self) -> tuple[list[str], Tensor | None]:
        """The names of all figures, and the figures as one tensor; None where there are none."""
        if not self._figures:
            return [], None
        return list(self._figures), torch.stack(list(self._figures.values()))

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            self._note(name, "input", inputs[0].detach(), "e4m3")
            weight = module.weight
            assert isinstance(weight, Tensor)
            self._note(name, "weight", weight.detach(), "e4m3")
            if output.requires_grad:
                output.register_hook(
                    lambda gradient: self._note(
                        name, "grad_output", gradient.detach(), self._backward_format
                    )
                )

        return hook

    def _note(self, name: str, tensor: str, value: Tensor, fp8_format: str) -> None:
        if not self._layers:
            return
        magnitude = value.abs()
        amax = magnitude.amax().float()
        scale = self._scales.get((name, tensor))
        if scale is None:
            # Current scaling: the scale is made from this very tensor.
            scale = _LARGEST[fp8_format] / amax
        scaled = magnitude.float() * scale
        prefix = f"fp8/{name}/{tensor}"
        self._figures[f"{prefix}/amax"] = amax
        self._figures[f"{prefix}/scale"] = scale.float()
        self._figures[f"{prefix}/saturated"] = (scaled > _LARGEST[fp8_format]).float().mean()
        vanishes = (magnitude > 0) & (scaled <= _UNDERFLOW[fp8_format])
        self._figures[f"{prefix}/underflow"] = vanishes.float().mean()
