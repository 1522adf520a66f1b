"""Which kernels Transformer Engine's norms use: its own, or cuDNN's.

Both compute the same. Transformer Engine's own are written for some widths; of the others, general
kernels take twice as long as cuDNN's (`benchmarks/norms.py`). The choice is one for a process.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["use_cudnn"]


def use_cudnn(*, forward: bool, backward: bool) -> None:
    """Norms go by cuDNN's kernels from here on, or by Transformer Engine's.

    Its core library reads the environment once, so that this tells it by its own functions
    (``nvte_enable_cudnn_norm_fwd`` and ``_bwd`` in its normalization.h); its extension for PyTorch
    reads the variable at each call, to know what the forward kernel can write.
    """
    from transformer_engine.common import _TE_LIB_CTYPES as library

    os.environ["NVTE_NORM_FWD_USE_CUDNN"] = str(int(forward))
    os.environ["NVTE_NORM_BWD_USE_CUDNN"] = str(int(backward))
    library.nvte_enable_cudnn_norm_fwd(ctypes.c_bool(forward))
    library.nvte_enable_cudnn_norm_bwd(ctypes.c_bool(backward))
