"""The most memory that training has taken."""

from __future__ import annotations

import resource

import torch

__all__ = ["peak_bytes"]


def peak_bytes(device: torch.device) -> int:
    """Bytes: of tensors on a CUDA device, or resident in this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
