"""Which kernels Transformer Engine's norms are computed by: its own, or cuDNN's.

Both compute the same. Of RMSNorm, Transformer Engine has kernels written for some widths
(transformer_engine/common/normalization/rmsnorm registers 512 to 8192 as tuned); for all others it
has general ones, which took two to three times as long as cuDNN's on an H200
(`benchmarks/norms.py`, docs/performance.md). cuDNN writes the amax of a cast where Transformer
Engine's kernels take the larger of it and what stands there. It is the same, for each forward pass
ends in an update of the scales and computes a norm once; only of a fused block that stands at
several places of a model is the amax that of the last of them.
"""

from __future__ import annotations

import ctypes
import os

import torch

from fp8core.engines.protocol import NormDescription

__all__ = ["choose_kernels", "cudnn_is_faster", "use_cudnn"]

# Those that Transformer Engine has kernels of its own for.
_TUNED_WIDTHS = frozenset({512, 768, 1024, 2048, 4096, 8192})
# Of narrower norms nothing is known: the narrowest measured that gains.
_LEAST_WIDTH = 1536
# Where it was measured; cuDNN has other kernels for other architectures.
_HOPPER = (9, 0)


def cudnn_is_faster(norm: NormDescription, capability: tuple[int, int]) -> bool:
    """Whether cuDNN computes ``norm`` faster on a device of this compute capability, as far as is
    known."""
    if norm.kind != "rms_norm" or len(norm.normalized_shape) != 1 or capability != _HOPPER:
        return False
    (width,) = norm.normalized_shape
    return width >= _LEAST_WIDTH and width not in _TUNED_WIDTHS


def choose_kernels(norm: NormDescription) -> None:
    """Before ``norm`` is computed for the first time: has it computed by the faster kernels.

    The choice is that of the whole process. A model that has norms of several widths is computed
    by cuDNN's kernels as soon as one of them gains, those that were proved before it too; at the
    other widths they took up to a quarter longer than Transformer Engine's own.
    """
    assert norm.weight is not None
    device = norm.weight.device
    if device.type == "cuda" and cudnn_is_faster(norm, torch.cuda.get_device_capability(device)):
        use_cudnn(forward=True, backward=True)


def use_cudnn(*, forward: bool, backward: bool) -> bool:
    """Norms of this process go by cuDNN's kernels from here on, or by Transformer Engine's.

    False where the installed version has not the functions that say so: all stays as it is.

    Its core library reads the environment once, so that it is told by its own functions
    (``nvte_enable_cudnn_norm_fwd`` and ``_bwd`` in its normalization.h); its extension for PyTorch
    reads the variable at each call, to know what the forward kernel can write.
    """
    from transformer_engine import common

    library = getattr(common, "_TE_LIB_CTYPES", None)
    enable_forward = getattr(library, "nvte_enable_cudnn_norm_fwd", None)
    enable_backward = getattr(library, "nvte_enable_cudnn_norm_bwd", None)
    if enable_forward is None or enable_backward is None:
        return False
    os.environ["NVTE_NORM_FWD_USE_CUDNN"] = str(int(forward))
    os.environ["NVTE_NORM_BWD_USE_CUDNN"] = str(int(backward))
    enable_forward(ctypes.c_bool(forward))
    enable_backward(ctypes.c_bool(backward))
    return True
