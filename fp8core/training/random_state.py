"""Seeding, and the state of every random generator as JSON, so that a resumed run draws on."""

from __future__ import annotations

import base64
import os
import random
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

__all__ = ["capture", "part_from_rank_0", "restore", "seed_everything"]

_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: spreads consecutive numbers


def seed_everything(seed: int, device: torch.device) -> None:
    """Seeds Python, numpy and torch; for ``device`` a CPU it asks torch for deterministic kernels.

    On a GPU it does not: flash attention and others have none, so that two runs differ all the
    same, while Transformer Engine takes the wish for a condition and refuses attention in FP8 for
    it with cuDNN before 9.19. Where torch knows of no deterministic kernel it warns and goes on.
    """
    # cuBLAS needs this for reproducible GEMMs, and reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(device.type == "cpu", warn_only=True)
    # Deterministic mode would also write NaN into all fresh memory, a check that costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def part_from_rank_0(seed: int, rank: int) -> None:
    """Gives a rank random numbers of its own once the model is built alike on all of them.

    Rank 0 draws on, so that it is what a job of one rank would be.
    """
    if rank > 0:
        own = (seed + rank * _MIX) % 2**63
        random.seed(own)
        np.random.seed(own % 2**32)
        torch.manual_seed(own)


def capture() -> dict[str, Any]:
    """The state of all generators that training can draw from, as JSON values.

    Of GPUs the current one: a process trains on one, and asking others would take their memory.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(torch.cuda.get_rng_state())] if torch.cuda.is_available() else [],
    }


def restore(state: dict[str, Any]) -> None:
    """Takes a ``capture`` back; that of a GPU is left out where there is none."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state(_decode(state["cuda"][0]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
