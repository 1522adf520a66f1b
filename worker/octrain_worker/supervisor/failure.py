"""What a crash was, by the words it left: hardware, memory, a full disk, CUDA, communication.

An exit code does not tell a broken GPU from a broken program, and where there are several ranks
the first to speak is often not the first to fail: the others see only that their peer is gone. So
the texts are searched for the kinds in the order of what causes what, and communication is last.

The words are those of CUDA's ``cudaGetErrorString``, of PyTorch's ``CUDA error:`` and
``DistBackendError`` messages and its NCCL watchdog, and of Gloo.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fp8core.spec.outcomes import Reason

__all__ = ["Failure", "find_failure"]


@dataclass(frozen=True)
class Failure:
    """A kind of failure, and the line that gave it away."""

    reason: Reason
    what: str
    line: str


def _words(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE)


_KINDS: tuple[tuple[Reason, str, re.Pattern[str]], ...] = (
    (
        Reason.HARDWARE_FAULT,
        "the GPU failed",
        _words(
            r"uncorrectable ECC error",
            r"uncorrectable NVLink error",
            r"cudaErrorECCUncorrectable",
            r"cudaErrorNvlinkUncorrectable",
            r"hardware stack error",
            r"fallen off the bus",
            r"GPU is lost",
            r"busy or unavailable",
            r"no CUDA-capable device is detected",
            r"CUDA error: unknown error",
            r"CUDA driver initialization failed",
            r"system not yet initialized",
        ),
    ),
    (
        Reason.OUT_OF_MEMORY,
        "the GPU's memory was exhausted",
        _words(
            r"CUDA out of memory",
            r"CUDA error: out of memory",
            r"cudaErrorMemoryAllocation",
            r"Cuda failure (\d+ )?'out of memory'",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"CUDNN_STATUS_ALLOC_FAILED",
        ),
    ),
    (
        Reason.OUT_OF_MEMORY,
        "the node's memory was exhausted",
        _words(
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
            r"(^|: )MemoryError\b",
            r"Cannot allocate memory",
            r"std::bad_alloc",
        ),
    ),
    (
        Reason.STORAGE_FULL,
        "a disk is full",
        _words(r"No space left on device", r"Disk quota exceeded"),
    ),
    (
        Reason.CUDA_ERROR,
        "CUDA reported an error",
        _words(
            r"CUDA error:",
            r"CUDA driver error:",
            r"CUBLAS_STATUS_\w+",
            r"CUDNN_STATUS_\w+",
            r"Triton Error \[CUDA\]",
            r"NVRTC_ERROR_\w+",
            r"device-side assert",
        ),
    ),
    (
        Reason.COMMUNICATION_ERROR,
        "the ranks lost one another",
        _words(
            r"Watchdog caught collective operation timeout",
            r"DistBackendError",
            r"NCCL error",
            r"ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError",
            r"NCCL communicator (was|is) aborted",
            r"gloo/transport/.*(closed by peer|reset by peer|timed out|refused)",
            r"DistStoreError|DistNetworkError",
        ),
    ),
)
_LONGEST_LINE = 500


def find_failure(text: str) -> Failure | None:
    """The first kind, in the order of causes, whose words are in ``text``; None without any."""
    lines = text.splitlines()
    for reason, what, words in _KINDS:
        for line in lines:
            if words.search(line.strip()):
                return Failure(reason, what, " ".join(line.split())[:_LONGEST_LINE])
    return None
