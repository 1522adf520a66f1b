"""Which kernels a GPU ran. The name of a GEMM's tells what it multiplied."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType

__all__ = ["E4M3_BY_E4M3", "E4M3_BY_E5M2", "fp8_gemms", "launched", "launches", "other_gemms"]

E4M3_BY_E4M3 = "_qqtst_"
"""In the names of GEMMs on Hopper: fprop, and with ``fp8_format: E4M3`` the two others."""
E4M3_BY_E5M2 = "_qrtst_"
"""dgrad and wgrad with ``fp8_format: HYBRID``."""

_FP8_GEMM = re.compile(r"nvjet_sm\d+_q|gemm.*(e4m3|e5m2|fp8)", re.IGNORECASE)
_GEMM = re.compile(r"nvjet|gemm|cutlass|xmma", re.IGNORECASE)


def launched(run: Callable[[], Any]) -> list[str]:
    """The names of the kernels that ``run`` launched, one for each launch."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [
        event.key
        for event in profile.key_averages()
        # Not the host's calls that launch them, nor copies.
        if event.device_type == DeviceType.CUDA and not event.key.startswith(("Memcpy", "Memset"))
        for _ in range(event.count)
    ]


def launches(names: Sequence[str], part: str) -> int:
    """How many of ``names`` have ``part`` in them."""
    return sum(part in name for name in names)


def fp8_gemms(names: Sequence[str]) -> list[str]:
    """Those of ``names`` that multiply FP8 by FP8, whichever of its formats and scalings."""
    return [name for name in names if _FP8_GEMM.search(name)]


def other_gemms(names: Sequence[str]) -> list[str]:
    return [name for name in names if _GEMM.search(name) and not _FP8_GEMM.search(name)]
