"""What every row of `train_peers` computes: a shape, its real text, the format of its weights."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peers.shapes import SHAPES, Shape, llama_config
from torch import Tensor

__all__ = ["LEARNING_RATE", "MAX_NORM", "WEIGHT_DECAY", "Step", "Work", "real_text"]

LEARNING_RATE, MAX_NORM, WEIGHT_DECAY = 3e-4, 1.0, 0.1
GPU = torch.device("cuda")

Step = Callable[[int], Tensor]
"""Step number (from 1) to its loss, fp32, 0-dim, on the device."""


@dataclass(frozen=True)
class Work:
    """``tokens`` [steps, rows, length] int64 of real text, on the host."""

    shape: str
    rows: int
    length: int
    tokens: Tensor
    precision: str
    device: torch.device = GPU

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def dimensions(self) -> Shape:
        return SHAPES[self.shape]

    def config(self) -> dict[str, Any]:
        """A Llama configuration of transformers."""
        return llama_config(self.dimensions, self.length)


def real_text(steps: int, rows: int, length: int) -> Tensor:
    """Bytes of the sources of Python's standard library as tokens [steps, rows, length]."""
    wanted = steps * rows * length
    text = bytearray()
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in path.parts:
            text += path.read_bytes()
        if len(text) >= wanted:
            break
    while len(text) < wanted:
        text += text[: wanted - len(text)]
    values = torch.frombuffer(text[:wanted], dtype=torch.uint8).long()
    return values.view(steps, rows, length)
