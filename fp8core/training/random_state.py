"""Seeding, and the state of every random generator as JSON, so that a resumed run draws on."""

from __future__ import annotations

import base64
import os
import random
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

__all__ = ["capture", "restore", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch, and asks torch for deterministic kernels.

    Where torch knows of no deterministic kernel it warns and goes on; on a CPU all are.
    """
    # cuBLAS needs this for reproducible GEMMs, and reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Deterministic mode would also write NaN into all fresh memory, a check that costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def capture() -> dict[str, Any]:
    """The state of all generators that training can draw from, as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def restore(state: dict[str, Any]) -> None:
    """Takes a ``capture`` back. States of GPUs that this machine lacks are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if torch.cuda.is_available():
        for device, encoded in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_decode(encoded), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
