"""The parts of a fused block whose GEMMs are told one by one what precision they run in.

Transformer Engine's fused modules know no ``override_linear_precision``. So the GEMMs are those of
`fp8core.engines.te_override`, joined as the fused modules join them, and what lies between them are
the kernels of blocks without FP8. Attention is Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8core.engines.protocol import NormDescription
from fp8core.fusion import high_precision
from fp8core.fusion.parts import Kernel, MLPHalf, NamedLinear, NormedKernel, joined
from fp8core.fusion.te_parts import TEParts

__all__ = ["MakeGemms", "NormGemms", "OverriddenParts"]

Weights = Callable[[], tuple[Tensor, Tensor | None]]
"""The weight ``[out_features, in_features]`` and the bias of a Linear, asked for at each pass."""
MakeGemms = Callable[[str, Weights], nn.Module]
"""An engine's Linear of this name, whose FP8 state it keeps."""


class OverriddenParts(TEParts):
    """`BlockParts` of a te engine whose recipe has ``override_linear_precision``."""

    kinds: ClassVar[Mapping[str, str]] = {
        "norm_linear": "NormGemms",
        "linear": "OverrideLinear",
        "norm_mlp": "NormGemms",
    }
    mlp_in_one: ClassVar[bool] = False

    def __init__(self, make_gemms: MakeGemms, dtype: torch.dtype, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._make_gemms = make_gemms
        self._dtype = dtype

    def norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> Kernel:
        return NormGemms(norm, self.linears(linears, name), self._dtype, and_norm=False)

    def norm_linear_and_norm(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> NormedKernel:
        return NormGemms(norm, self.linears(linears, name), self._dtype, and_norm=True)

    def linears(self, linears: Sequence[NamedLinear], name: str) -> Kernel:
        together = tuple(linears)
        return self._make_gemms(name, lambda: joined(together))

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        raise TypeError("an MLP whose GEMMs are told their precision one by one is taken in steps")

    def norm_mlp_and_norm(self, half: MLPHalf) -> NormedKernel:
        raise TypeError("an MLP whose GEMMs are told their precision one by one is taken in steps")


class NormGemms(nn.Module):
    """``gemms`` of the normalised input, in ``dtype``; ``and_norm``: and that input."""

    def __init__(
        self, norm: NormDescription, gemms: Kernel, dtype: torch.dtype, *, and_norm: bool
    ) -> None:
        super().__init__()
        high_precision.raise_unless_taken(norm)
        self._norm, self._dtype, self._and_norm = norm, dtype, and_norm
        # Its weights are the model's own, under their names there.
        self.__dict__["_gemms_of_it"] = gemms

    def forward(self, x: Tensor) -> Any:
        normalised = high_precision.normalise(x, self._norm, self._dtype)
        output = self.__dict__["_gemms_of_it"](normalised)
        return (output, normalised) if self._and_norm else output
