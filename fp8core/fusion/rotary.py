"""The angles of a model's rotary position embedding, taken from the model and proved on numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RotaryAngles", "rotary_angles"]

# cos and sin of the same fp32 angles, computed twice; positions reach 10^5, angles as far.
_TOLERANCE = 1e-6


class RotaryAngles:
    """``position * frequency`` for each pair of a head's elements, [T, head_dim] fp32."""

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies.detach().float().cpu()
        # All that were ever made, each twice as long as the one before or longer: a CUDA graph that
        # read one reads it at each replay.
        self._tables: list[Tensor] = []

    @property
    def head_dim(self) -> int:
        return 2 * self._frequencies.numel()

    def upto(self, length: int, device: torch.device) -> Tensor:
        """Those of positions 0 to ``length``; the second half of each row repeats the first."""
        table = self._tables[-1] if self._tables else None
        if table is None or table.shape[0] < length or table.device != device:
            longer = length if table is None else max(length, 2 * table.shape[0])
            positions = torch.arange(longer, dtype=torch.float32, device=device)
            half = positions[:, None] * self._frequencies.to(device)[None, :]
            table = torch.cat((half, half), dim=-1)
            self._tables.append(table)
        return table[:length]


def rotary_angles(model: nn.Module, length: int) -> tuple[RotaryAngles | None, str | None]:
    """The angles that ``model`` seems to rotate by, and why it does not, where that shows.

    They are compared for the ``length`` positions of a row; they must not depend on the length of a
    batch, and cos and sin must come out unscaled. No angles where there are none, or several kinds.
    """
    found: list[Any] = [module for module in model.modules() if hasattr(module, "inv_freq")]
    if len(found) != 1 or not isinstance(found[0].inv_freq, Tensor):
        return None, f"the model has {len(found)} rotary position embeddings, not one"
    rotary = found[0]
    angles = RotaryAngles(rotary.inv_freq)
    return angles, _difference(rotary, angles, length)


def _difference(rotary: Any, angles: RotaryAngles, length: int) -> str | None:
    what = "the model's rotary position embedding"
    if getattr(rotary, "rope_type", "default") not in ("default", "linear", "llama3"):
        return f"{what}, of type {rotary.rope_type}, changes with the length of a batch"
    device = rotary.inv_freq.device
    positions = torch.arange(length, device=device)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            values = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
            cosine, sine = rotary(values, position_ids=positions[None])
    # A rotary module of another kind may take other arguments and fail in its own way.
    except Exception as error:
        return f"{what} cannot be called: {type(error).__name__}: {error}"
    table = angles.upto(length, device)
    for given, own in ((cosine[0].float(), table.cos()), (sine[0].float(), table.sin())):
        if given.shape != own.shape or float((given - own).abs().max()) > _TOLERANCE:
            return f"{what} is not cos and sin of position times frequency"
    return None
