"""Weights for small models whose blocks are compared."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["with_random_weights"]


def with_random_weights(model: Any) -> Any:
    """``model``, with the same weights each time, large enough that each part of it shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
            else:
                parameter.uniform_(0.3, 1.5, generator=generator)
    return model
