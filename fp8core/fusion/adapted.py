"""GEMMs of a fused half in steps, with what stands beside their layers.

Adapters need the input of the layers that they stand beside. Where norm and GEMMs are one kernel
that is the normalised input, which the kernel then gives too; an MLP in one kernel never shows it,
nor the product that goes into down, so that one with adapters takes three steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fp8core.engines.protocol import NormDescription
from fp8core.fusion.adapters import Adapters, Beside
from fp8core.fusion.parts import BlockParts, Kernel, MLPHalf, NamedLinear, NormedKernel

__all__ = ["JoinedLinears", "Modules", "OneLinear", "SteppedMLP"]

Modules = dict[str, tuple[Any, tuple[tuple[str, ...], ...]]]
"""What computes, by name, with the layers of each of its GEMMs."""


class JoinedLinears:
    """Linears, side by side, of one input, which ``norm`` normalises where it is given.

    ``and_norm``: whether `with_norm` will be asked for.
    """

    def __init__(
        self,
        norm: NormDescription | None,
        linears: Sequence[NamedLinear],
        name: str,
        parts: BlockParts,
        beside: Beside,
        *,
        and_norm: bool = False,
    ) -> None:
        self._name = name
        self._layers = tuple(linear.name for linear in linears)
        self._adapters = beside.adapters(linears)
        self._kernel: Kernel | None = None
        self._normed_kernel: NormedKernel | None = None
        if norm is None:
            self._kernel = parts.linears(linears, name)
        elif and_norm or self._adapters is not None:
            self._normed_kernel = parts.norm_linear_and_norm(norm, linears, name)
        else:
            self._kernel = parts.norm_linear(norm, linears, name)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel is None:
            return self.with_norm(x)[0]
        if self._adapters is not None:
            self._adapters.unmerge_disabled()
        output = self._kernel(x)
        return output if self._adapters is None else self._adapters(output, x)

    def with_norm(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """And the normalised input."""
        assert self._normed_kernel is not None
        if self._adapters is not None:
            self._adapters.unmerge_disabled()
        output, normalised = self._normed_kernel(x)
        if self._adapters is not None:
            output = self._adapters(output, normalised)
        return output, normalised

    @property
    def modules(self) -> Modules:
        kernel = self._kernel or self._normed_kernel
        return {self._name: (kernel, (self._layers,)), **_modules(self._name, self._adapters)}


class OneLinear:
    """One Linear of an input that is there anyway."""

    def __init__(self, linear: NamedLinear, parts: BlockParts, beside: Beside) -> None:
        self._name = linear.name
        self._adapters = beside.adapters([linear])
        self._kernel = parts.linear(linear)

    def __call__(self, x: Tensor) -> Tensor:
        if self._adapters is not None:
            self._adapters.unmerge_disabled()
        output = self._kernel(x)
        return output if self._adapters is None else self._adapters(output, x)

    @property
    def modules(self) -> Modules:
        own = {self._name: (self._kernel, ((self._name,),))}
        return {**own, **_modules(self._name, self._adapters)}


class SteppedMLP:
    """``down(act(gate) * up)`` of the normalised input, or ``down(act(up))``, in three steps.

    Beside it the normalised input, where the half says so.
    """

    def __init__(self, half: MLPHalf, parts: BlockParts, beside: Beside) -> None:
        self._half = half
        self._parts = parts
        group = half.group + half.gemms[0]
        self._inner = JoinedLinears(
            half.norm, half.inputs, group, parts, beside, and_norm=half.returns_norm
        )
        self._down = OneLinear(half.down, parts, beside)

    def __call__(self, x: Tensor) -> Any:
        if not self._half.returns_norm:
            return self._output(self._inner(x))
        inner, normalised = self._inner.with_norm(x)
        return self._output(inner), normalised

    def _output(self, inner: Tensor) -> Tensor:
        return self._down(self._parts.active(inner, self._half.activation))

    @property
    def modules(self) -> Modules:
        return {**self._inner.modules, **self._down.modules}


def _modules(name: str, adapters: Adapters | None) -> Modules:
    return {} if adapters is None else {f"{name}.adapters": (adapters, adapters.gemms)}
