"""Current scaling: the scale of a cast comes from the amax of the very tensor it casts.

The arithmetic is that of Transformer Engine's ``compute_scale_from_amax``
(``transformer_engine/common/recipe/recipe_common.cuh``) with an epsilon of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["current_scale"]

FLOAT32_MAX = torch.finfo(torch.float32).max


def current_scale(amax: Tensor, fp8_max: float, *, power_of_two: bool = False) -> Tensor:
    """``fp8_max / amax`` in fp32 for an fp32 ``amax`` of any shape.

    It is 1 where the amax is zero, infinite or NaN, and the largest fp32 number where the quotient
    overflows. With ``power_of_two`` its mantissa is cut off, which leaves the largest power of two
    that is not above it.
    """
    usable = torch.isfinite(amax) & (amax > 0)
    # Not `fp8_max / amax`: PyTorch takes that as a reciprocal and a product, rounded twice.
    scale = torch.full_like(amax, fp8_max) / amax
    scale = torch.where(torch.isinf(scale), FLOAT32_MAX, scale)
    if power_of_two:
        scale = scale.view(torch.int32).bitwise_and(-(1 << 23)).view(torch.float32)
    return torch.where(usable, scale, 1.0)
