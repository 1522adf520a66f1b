"""The layers that the te engine has converted, and where the FP8 state of each lies.

Under delayed scaling that is the engine's own (`te_state`) where the layers are its own, else
Transformer Engine's, in the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fp8core.engines.state_check import check_state
from fp8core.engines.te_attention_state import (
    attention_states,
    attention_tensors,
    begin_attention,
)
from fp8core.engines.te_state import (
    DirectionState,
    OwnDelayedState,
    ScaleInterval,
    gemms_of,
    te_directions,
)

__all__ = ["ConvertedLayers"]


class ConvertedLayers:
    """``linears``, ``fused`` and ``attentions`` by name. ``own``: None but under delayed scaling;
    ``overridden``: whether it holds the state of all linear layers."""

    def __init__(self, own: OwnDelayedState | None, *, overridden: bool) -> None:
        self.linears: dict[str, Any] = {}
        self.fused: dict[str, Any] = {}
        self.attentions: dict[str, Any] = {}
        self.own = own
        self._overridden = overridden

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            for modules in (self.fused, self.linears, self.attentions):
                modules.pop(name, None)
            if self.own is not None:
                self.own.forget(name)

    def take_fused(self, name: str, module: Any, gemms: tuple[str, ...]) -> None:
        module.__dict__["_gemms"] = gemms
        self.fused[name] = module

    def scales(self, direction: str) -> dict[str, Tensor]:
        return {name: state.scale for name, state in self.all_states(direction)}

    def states(self, direction: str) -> Iterator[tuple[str, DirectionState]]:
        if self.own is None:
            return
        if self._overridden:
            yield from getattr(self.own, direction).items()
            return
        for name, found, state in te_directions({**self.linears, **self.fused}):
            if found == direction:
                yield name, state

    def all_states(self, direction: str) -> Iterator[tuple[str, DirectionState]]:
        """Those of GEMMs, and of attention in FP8."""
        yield from self.states(direction)
        yield from attention_states(self.attentions, direction)

    def attention_tensors(self) -> Iterator[tuple[tuple[str, str], DirectionState, int]]:
        return attention_tensors(self.attentions if self.own is not None else {})

    def state_dict(
        self, interval: ScaleInterval, in_recipe: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, Tensor]:
        self._initialise_state(in_recipe)
        state: dict[str, Tensor] = {
            f"{name}/{direction}/{field}": getattr(layer, field).detach().clone()
            for direction in ("forward", "backward")
            for name, layer in self.all_states(direction)
            for field in ("scale", "amax_history")
        }
        for direction, count in interval.updates.items():
            state[f"updates/{direction}"] = torch.tensor(count, dtype=torch.int64)
        return state

    def load_state_dict(
        self,
        state: Mapping[str, Tensor],
        interval: ScaleInterval,
        in_recipe: Callable[[], AbstractContextManager[None]],
    ) -> None:
        check_state(state, self.state_dict(interval, in_recipe))
        for direction in ("forward", "backward"):
            for name, layer in self.all_states(direction):
                for field in ("scale", "amax_history"):
                    getattr(layer, field).copy_(state[f"{name}/{direction}/{field}"])
            interval.updates[direction] = int(state[f"updates/{direction}"])
            interval.hold(direction, self.scales(direction))

    def _initialise_state(self, in_recipe: Callable[[], AbstractContextManager[None]]) -> None:
        """Make modules allocate their FP8 buffers, which they otherwise do in the first forward."""
        layers = []
        if self.own is not None and not self._overridden:
            layers = [*self.linears.values(), *self.fused.values()]
        bare = [layer for layer in layers if "scaling_fwd" not in layer.fp8_meta]
        if not bare and not self.attentions:
            return
        with torch.no_grad(), in_recipe():
            for layer in bare:
                layer.init_fp8_metadata(num_gemms=len(gemms_of(layer)))
            begin_attention(self.attentions)
