"""The moments of AdamW, in fp32 to compute with and in their format where they are stored.

In 8 bits (``torch.uint8`` stands for it) a parameter's state holds codes in the parameter's shape
and the exponents of their blocks beside them; of the second moment the root, which the update
divides by (`fp8core.numerics.block_floats`). Norms and biases, and whatever has fewer than two
dimensions, keep moments in fp32: they are few, and what is done to one is done to a whole layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fp8core.numerics.block_floats import MOMENT, ROOT, block_count, decode, encode

__all__ = [
    "bytes_of_moments",
    "formats_of_8_bits",
    "in_8_bits",
    "new_moments",
    "read",
    "write",
]

_KINDS = {"exp_avg": MOMENT, "exp_avg_sq": ROOT}
_EXPONENTS = "_exponents"


def new_moments(parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Both moments as zeros, by the names they have in the optimizer's state."""
    if not _is_kept_in_8_bits(parameter.ndim, dtype):
        dtype = torch.float32 if dtype == torch.uint8 else dtype
        return {key: torch.zeros_like(parameter, dtype=dtype) for key in _KINDS}
    state = {}
    for key in _KINDS:
        state[key] = torch.zeros_like(parameter, dtype=dtype)
        blocks = block_count(parameter.numel())
        state[key + _EXPONENTS] = torch.zeros(blocks, dtype=dtype, device=parameter.device)
    return state


def in_8_bits(state: Mapping[str, Tensor]) -> bool:
    """Whether the moments of this parameter are stored so."""
    return "exp_avg" + _EXPONENTS in state


def read(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both moments in fp32; copies, unless they are stored so."""
    if not in_8_bits(state):
        return {key: state[key].float() for key in _KINDS}
    values = {key: decode(state[key], state[key + _EXPONENTS], k) for key, k in _KINDS.items()}
    return values | {"exp_avg_sq": values["exp_avg_sq"].square()}


def write(
    state: Mapping[str, Tensor], values: Mapping[str, Tensor], generator: torch.Generator
) -> None:
    """Puts what ``read`` gave, and an update changed, back into 8 bits, stochastically rounded.

    What an update has not changed keeps every bit: the root of a square of so few bits is exact.
    """
    for key, kind in _KINDS.items():
        value = values[key].sqrt() if kind is ROOT else values[key]
        codes, exponents = encode(value, kind, generator)
        state[key].copy_(codes)
        state[key + _EXPONENTS].copy_(exponents)


def bytes_of_moments(shapes: Iterable[torch.Size], dtype: torch.dtype) -> int:
    """What both moments of parameters of these shapes take."""
    total = 0
    for shape in shapes:
        count = shape.numel()
        if _is_kept_in_8_bits(len(shape), dtype):
            total += count + block_count(count)
        else:
            total += count * (torch.float32 if dtype == torch.uint8 else dtype).itemsize
    return total * len(_KINDS)


def formats_of_8_bits(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Bytes (exponents with them) and elements by format, of an optimizer's tensors by name."""
    formats: dict[str, dict[str, int]] = {}
    for name, exponents in tensors.items():
        if name.endswith(_EXPONENTS):
            codes = tensors[name.removesuffix(_EXPONENTS)]
            key = name.removesuffix(_EXPONENTS).rpartition("/")[2]
            found = formats.setdefault(_KINDS[key].name, {"bytes": 0, "elements": 0})
            found["bytes"] += codes.nbytes + exponents.nbytes
            found["elements"] += codes.numel()
    return formats


def _is_kept_in_8_bits(dimensions: int, dtype: torch.dtype) -> bool:
    return dtype == torch.uint8 and dimensions >= 2
