"""Layers whose weight lies in a Parameter of another shape: transposed, or a part of it.

An engine builds its layer over a plain Linear. Where a model keeps that Linear's weight otherwise,
the layer's ``weight`` becomes a view of the model's own Parameter, taken anew whenever the layer
reads it. So nothing is copied, state dicts, optimizers and ties see the model's Parameter under its
own key and in its own layout, and gradients reach it through the view.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Part", "PartLinear", "plain_linear", "see_part", "see_transposed"]


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An ``nn.Linear`` over ``weight`` [out_features, in_features], for an engine to look at.

    What is no Parameter is held as one that shares its memory.
    """
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = _as_parameter(weight)
    linear.bias = None if bias is None else _as_parameter(bias)  # type: ignore[assignment]
    return linear


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


@dataclass(frozen=True, eq=False)
class Part:
    """Rows ``start`` to ``start + rows`` of Parameters of ``owner``, as weight and bias.

    The whole of the weight where ``rows`` is all it has; ``bias_key`` None: there is no bias.
    """

    owner: nn.Module
    weight_key: str
    bias_key: str | None
    weight_start: int
    bias_start: int
    rows: int

    def weight(self) -> Tensor:
        return self._rows_of(self.weight_key, self.weight_start)

    def bias(self) -> Tensor | None:
        return None if self.bias_key is None else self._rows_of(self.bias_key, self.bias_start)

    def as_linear(self) -> nn.Linear:
        return plain_linear(self.weight(), self.bias())

    def _rows_of(self, key: str, start: int) -> Tensor:
        whole: Tensor = getattr(self.owner, key)
        return whole if whole.shape[0] == self.rows else whole.narrow(0, start, self.rows)


class PartLinear(nn.Linear):
    """A Linear without Parameters of its own over a `Part`: in high precision, as torch's own."""

    def __init__(self, part: Part) -> None:
        weight = part.weight()
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        see_part(self, part)


def see_part(layer: nn.Module, part: Part) -> None:
    """Takes ``layer``'s Parameters away; its ``weight`` and ``bias`` are those of ``part``."""
    for key in ("weight", "bias"):
        layer._parameters.pop(key, None)
    layer.__dict__["part"] = part
    kind: Any = type(layer)
    layer.__class__ = _partial(kind)


def see_transposed(layer: nn.Module, weight: nn.Parameter) -> None:
    """Has ``layer`` hold ``weight`` [in_features, out_features] and read it transposed."""
    layer._parameters["weight"] = weight
    kind: Any = type(layer)
    layer.__class__ = _transposing(kind)


@functools.cache
def _partial(kind: Any) -> Any:
    members = {
        "weight": property(lambda layer: layer.part.weight()),
        "bias": property(lambda layer: layer.part.bias()),
    }
    return _derived(kind, members)


@functools.cache
def _transposing(kind: Any) -> Any:
    return _derived(kind, {"weight": property(_transposed_weight)})


def _transposed_weight(layer: nn.Module) -> Tensor:
    weight = layer._parameters["weight"]
    assert weight is not None
    return torch.t(weight)


def _derived(kind: type[nn.Module], members: dict[str, Any]) -> Any:
    """A subclass under the same name: reports and metrics speak of the engine's layer."""
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})
