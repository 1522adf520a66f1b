"""The environment of a trainer: what it needs and nothing else.

An allow-list, because a deny-list forgets: no database, broker or API credentials, no cloud keys,
no tokens reach code that runs models and data of others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

__all__ = ["MARKER", "trainer_environment"]

# Every process of an attempt carries this variable, so that a successor finds what was left over.
MARKER = "OCTRAIN_SUPERVISOR_NONCE"

_NAMES = frozenset(
    {
        "CPATH",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_DATASETS_CACHE",
        "HF_DATASETS_OFFLINE",
        "HF_ENDPOINT",
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "LIBRARY_PATH",
        "LOGNAME",
        # The mark of a local stack, by which it finds what is left of it.
        "OCTRAIN_STACK",
        "PATH",
        "PYTHONHASHSEED",
        "PYTHONHOME",
        "PYTHONPATH",
        "REQUESTS_CA_BUNDLE",
        "SHELL",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TOKENIZERS_PARALLELISM",
        "TRANSFORMERS_OFFLINE",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
    }
)
_PREFIXES = (
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "KMP_",
    "LC_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "NVTE_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
)


def trainer_environment(
    nonce: str, *, extra_names: Iterable[str] = (), base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The allowed part of ``base`` (this process's environment by default), marked with ``nonce``.

    ``extra_names`` are what the operator allows beside.
    """
    source = os.environ if base is None else base
    allowed = _NAMES | set(extra_names)
    chosen = {
        name: value
        for name, value in source.items()
        if name in allowed or name.startswith(_PREFIXES)
    }
    # Log lines come out as they are printed, also when print goes to a file.
    return {**chosen, "PYTHONUNBUFFERED": "1", MARKER: nonce}
