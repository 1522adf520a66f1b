"""The parts of a fused block whose backward GEMMs are not in FP8: those of ``backward_override``.

They are Transformer Engine's modules, of which the one for a whole MLP knows no such field. So an
MLP is ``LayerNormLinear``, the activation in a kernel, and ``Linear``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fp8core.fusion.parts import Kernel, MLPHalf, NormedKernel
from fp8core.fusion.te_parts import TEParts

__all__ = ["BackwardParts"]


class BackwardParts(TEParts):
    """`BlockParts` of a te engine whose recipe has ``backward_override``.

    ``weight_dtype``: what the GEMMs are given weights in, where that is not their own; see
    `fp8core.engines.te_modules.make_linear`.
    """

    mlp_in_one: ClassVar[bool] = False

    def __init__(self, weight_dtype: torch.dtype | None, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._weight_dtype = weight_dtype

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        raise TypeError("LayerNormMLP has no backward_override: such an MLP is taken in steps")

    def norm_mlp_and_norm(self, half: MLPHalf) -> NormedKernel:
        raise TypeError("LayerNormMLP has no backward_override: such an MLP is taken in steps")
