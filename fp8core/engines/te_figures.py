"""The figures of FP8 health of the te engine's layers: which scales and amaxes they go by."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fp8core.engines.te_health import HealthRecorder, cast_rules
from fp8core.engines.te_layers import ConvertedLayers
from fp8core.engines.te_modules import kept_casts
from fp8core.engines.te_state import BACKWARD_COLUMNS, FORWARD_COLUMNS, gemms_of, infinities
from fp8core.engines.weight_casts import WeightCasts
from fp8core.numerics.landing import Landing

__all__ = ["Figures"]


class Figures:
    """Counts what casts do to the tensors of ``layers`` in the steps that are recorded."""

    def __init__(
        self, recipe: Any, layers: ConvertedLayers, casts: WeightCasts, device: torch.device
    ) -> None:
        self._layers = layers
        self._casts = casts
        self.recorder = HealthRecorder(self._scales, cast_rules(recipe), device)

    def record(self, enabled: bool) -> None:
        layers = self._layers
        hidden = [key for key, _, _ in layers.attention_tensors()]
        self.recorder.record(enabled, {**layers.linears, **layers.fused}, hidden)

    def read_later(self) -> Callable[[], dict[str, float]]:
        read_figures = self.recorder.read_later(self._hidden_amaxes())
        if read_figures is None:
            return dict
        tensors, counted = list[Tensor](), list[str]()
        for direction, columns in (("forward", FORWARD_COLUMNS), ("backward", BACKWARD_COLUMNS)):
            found, counts = infinities(dict(self._layers.states(direction)), columns)
            if counts is not None:
                counted += found
                tensors.append(counts)
        landing = Landing(tensors)

        def read() -> dict[str, float]:
            counts = [count for row in landing.wait() for count in row.tolist()]
            infinite = {n: float(c) for n, c in zip(counted, counts, strict=True) if c}
            return read_figures() | infinite

        return read

    def _scales(self) -> dict[tuple[str, str], Tensor]:
        """The scales of the next casts by (layer, tensor); none where they are made at the cast."""
        layers = self._layers
        scales: dict[tuple[str, str], Tensor] = {}
        for name, state in layers.states("forward"):
            scales[name, "input"], scales[name, "weight"] = state.scale[0], state.scale[1]
        for name, state in layers.states("backward"):
            scales[name, "grad_output"] = state.scale[0]
        for key, state, column in layers.attention_tensors():
            scales[key] = state.scale[column]
        if layers.own is None:
            return scales
        for name, module in {**layers.linears, **layers.fused}.items():
            for gemm, cast in kept_casts(name, module, self._casts):
                scales[gemm, "weight"] = cast._scale_inv.reciprocal().reshape(())
        return scales

    def _hidden_amaxes(self) -> dict[tuple[str, str], Tensor]:
        """The newest amaxes of what lies between the GEMMs of fused modules, and in attention."""
        layers = self._layers
        if layers.own is None or layers.own.history_length == 1:  # of which nothing is kept
            return {}
        between = [
            (name + first, name + second)
            for name, module in layers.fused.items()
            for first, second in pairwise(gemms_of(module))
        ]
        forward, backward = dict(layers.states("forward")), dict(layers.states("backward"))
        attention = {
            key: state.amax_history[-1, column] for key, state, column in layers.attention_tensors()
        }
        return attention | {
            key: states[key[0]].amax_history[-1, 0]
            for first, second in between
            for key, states in (((second, "input"), forward), ((first, "grad_output"), backward))
            if key[0] in states
        }
