"""LoRA adapters beside the layers of a fused half, added to what its GEMMs compute.

A fused half passes its layers by, and with them the modules that ``peft`` puts around them. Their
parameters are found where ``peft`` keeps them, at each call: what is trained, saved and exported is
theirs. Adapters of one input are applied together: the matrices A as one GEMM where nothing is
dropped out, each B within the columns of its layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8core.fusion.layouts import PassedBy
from fp8core.fusion.parts import NamedLinear
from fp8core.spec import LoraAdapter

__all__ = ["Adapters", "Beside", "PlannedAdapters"]


@dataclass(frozen=True)
class PlannedAdapters:
    """Those that will be put around ``layers`` of a model, which is frozen then."""

    layers: frozenset[str]
    settings: LoraAdapter


class Adapters(nn.Module):
    """Adds what the adapters of some Linears, side by side, make of the input that they share.

    It stands outside the module tree and holds no parameters of its own. What is merged or disabled
    adds nothing. Raises TypeError for an adapter that computes more than LoRA does.
    """

    def __init__(self, places: Sequence[_Place]) -> None:
        super().__init__()
        self._places = tuple(places)

    def unmerge_disabled(self) -> None:
        """Takes those that are merged and disabled out of the weights again, as ``peft`` does.

        To be called before the Linears are.
        """
        for place in self._places:
            found: Any = place.module
            if getattr(found, "disable_adapters", False) and found.merged:
                found.unmerge()

    def forward(self, output: Tensor, x: Tensor) -> Tensor:
        """``output`` [..., all features], of the Linears of ``x``, with the adapters' sums."""
        pieces = list(self._pieces())
        if not pieces:
            return output
        downs = [piece.down.weight for piece in pieces]
        drops = any(piece.drops for piece in pieces)
        if drops or not torch.is_autocast_enabled(x.device.type):
            # As peft does. Dropout in another dtype may draw other random numbers.
            x = x.to(downs[0].dtype)
        if drops:
            inner = [F.linear(piece.dropout(x), piece.down.weight) for piece in pieces]
        else:
            together = F.linear(x, torch.cat(downs) if len(downs) > 1 else downs[0])
            inner = list(torch.split(together, [down.shape[0] for down in downs], dim=-1))
        found: Tensor = _AddColumns.apply(  # type: ignore[no-untyped-call]
            output,
            [(piece.columns, piece.scaling) for piece in pieces],
            *(values.to(output.dtype) for values in inner),
            *(piece.up.weight.to(output.dtype) for piece in pieces),
        )
        return found

    @property
    def gemms(self) -> tuple[tuple[str, ...], ...]:
        """The names of the matrices of each GEMM, in the order of a forward pass."""
        pieces = list(self._pieces())
        downs = tuple(piece.name.format("A") for piece in pieces)
        ups = tuple((piece.name.format("B"),) for piece in pieces)
        if any(piece.drops for piece in pieces):
            return (*((down,) for down in downs), *ups)
        return (downs, *ups)

    def _pieces(self) -> Iterator[_Piece]:
        begin = 0
        for place in self._places:
            end = begin + place.linear.out_features
            yield from _pieces(place, slice(begin, end))
            begin = end


@dataclass(frozen=True)
class Beside:
    """What stands beside the layers of ``block``, which is ``name`` in the model.

    ``adapted``: the names of the layers that have adapters, or will have.
    """

    block: nn.Module
    name: str
    adapted: frozenset[str]

    def adapters(self, linears: Sequence[NamedLinear]) -> Adapters | None:
        """Those of these layers; None where none of them has any."""
        if not any(linear.name in self.adapted for linear in linears):
            return None
        return Adapters([self._place(linear) for linear in linears])

    def bare(self, passed_by: PassedBy, called: Sequence[str] = ()) -> Bare:
        """Of a half that passes these modules by; ``called``: the names of those it calls."""
        names = [f"{self.name}.{path}" for path in passed_by.paths(self.block)]
        others = self.adapted.union(called)
        return Bare([(name, *self._children(name)) for name in names if name not in others])

    def _place(self, linear: NamedLinear) -> _Place:
        return _Place(*self._children(linear.name), linear)

    def _children(self, name: str) -> tuple[dict[str, nn.Module | None], str]:
        """Those of the parent of the layer ``name``, and which of them it is."""
        parent, _, key = name.removeprefix(f"{self.name}.").rpartition(".")
        return self.block.get_submodule(parent)._modules, key


class Bare:
    """The modules that a fused half passes by, but for layers with adapters.

    ``places``: the name of each, the children of its parent, and which of them it is.
    """

    def __init__(self, places: Sequence[tuple[str, dict[str, nn.Module | None], str]]) -> None:
        self._held = [(name, children, key, children[key]) for name, children, key in places]

    def raise_if_replaced(self) -> None:
        """Raises TypeError where something was put in the place of one since: it is not called."""
        for name, children, key, own in self._held:
            if children[key] is not own:
                raise TypeError(
                    f"{name} was replaced by a {type(children[key]).__name__} after its block was "
                    "fused, which would never be called: tell `convert` of the adapters, or fuse "
                    "no blocks (conversion.fuse: none)"
                )


@dataclass(frozen=True)
class _Place:
    """Where a layer stands: ``children`` are those of its parent."""

    children: dict[str, nn.Module | None]
    key: str
    linear: NamedLinear

    @property
    def module(self) -> nn.Module | None:
        return self.children[self.key]


@dataclass(frozen=True)
class _Piece:
    """One adapter of one layer: ``up(down(dropout(x))) * scaling`` in ``columns`` of the output.

    ``name``: of its matrices, with a place for the letter of each.
    """

    name: str
    down: nn.Linear
    up: nn.Linear
    dropout: nn.Module
    scaling: float
    columns: slice

    @property
    def drops(self) -> bool:
        return self.dropout.training and not isinstance(self.dropout, nn.Identity)


def _pieces(place: _Place, columns: slice) -> Iterator[_Piece]:
    found: Any = place.module
    name = place.linear.name
    if found is place.linear.module:
        return
    from peft.tuners.lora import Linear as LoraLinear  # it takes seconds to import

    # Others of peft have its parameters too, and compute something else with them.
    if type(found) is not LoraLinear or found.base_layer is not place.linear.module:
        kind = f"{type(found).__module__}.{type(found).__qualname__}"
        raise TypeError(f"{name} was replaced by a {kind}, which is not LoRA's beside a Linear")
    if found._forward_pre_hooks_with_kwargs:
        # As peft puts around a call with adapters by row (adapter_names).
        raise TypeError(
            f"hooks on {name}, as of an adapter for each row, would be passed by: its block is "
            "fused, and the layer is not called"
        )
    if found.disable_adapters or found.merged:
        return
    for key in found.active_adapters:
        if key not in found.lora_A:
            continue
        down, up = found.lora_A[key], found.lora_B[key]
        plain = type(down) is nn.Linear and type(up) is nn.Linear and up.bias is None
        if not plain or key in getattr(found, "lora_variant", ()):
            raise TypeError(
                f"the adapter {key!r} beside {name} computes more than LoRA does, and a fused "
                "block would not: fuse no blocks (conversion.fuse: none)"
            )
        scaling, dropout = float(found.scaling[key]), found.lora_dropout[key]
        yield _Piece(f"{name}.lora_{{}}.{key}", down, up, dropout, scaling, columns)


class _AddColumns(torch.autograd.Function):
    """``output`` and, in some columns each, ``scaling * inner @ up.T``: one pass over ``output``.

    Called with all inners, then all ups. Backward goes the other way through them, as the watch
    over GEMMs expects.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, places: list[tuple[slice, float]], *matrices: Tensor
    ) -> Tensor:
        count = len(places)
        found = output.flatten(0, -2).clone()
        inners = [inner.flatten(0, -2) for inner in matrices[:count]]
        ups = matrices[count:]
        for (columns, scaling), inner, up in zip(places, inners, ups, strict=True):
            part = found[:, columns]
            torch.addmm(part, inner, up.t(), alpha=scaling, out=part)
        ctx.save_for_backward(*inners, *ups)
        ctx.places = places
        return found.view(output.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        count, saved = len(ctx.places), ctx.saved_tensors
        above = gradients[0].flatten(0, -2)
        found: list[Tensor | None] = [None] * (2 * count)
        for index in reversed(range(count)):
            columns, scaling = ctx.places[index]
            part, inner, up = above[:, columns], saved[index], saved[count + index]
            if ctx.needs_input_grad[2 + index]:
                of_inner = torch.mm(part, up).mul_(scaling)
                found[index] = of_inner.view(*gradients[0].shape[:-1], -1)
            if ctx.needs_input_grad[2 + count + index]:
                found[count + index] = torch.mm(part.t(), inner).mul_(scaling)
        return gradients[0], None, *found
