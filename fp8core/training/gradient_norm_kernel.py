"""The 2-norm of all gradients on a GPU, in one launch that reads each of them once.

PyTorch's own takes a launch for some hundreds of tensors' parts, between which the device waits.
Every program writes a sum of its own and these are added in one order: the same gradients give the
same norm to the bit. Imported where Triton is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gradient_norm"]

_BLOCK = 2048
_WARPS = 8
_PARTS = tl.constexpr(4)
"""Blocks a program, all read at once."""
_LOADED_TOGETHER = 16  # bytes, and a multiple of it in elements
_COLUMNS = tl.constexpr(3)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Of contiguous tensors on one CUDA device: fp32, 0-dim."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            alike.setdefault(gradient.dtype, []).append(gradient)
    sums = [_sums_of_squares(some) for some in alike.values()]
    if not sums:
        return torch.zeros((), device=gradients[0].device)
    return torch.cat(sums).sum().sqrt()


def _sums_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """fp32 ``[programs]``: of tensors of one dtype, the sums of their parts."""
    rows, begin, aligned = [], 0, True
    for gradient in gradients:
        elements, place = gradient.numel(), gradient.data_ptr()
        aligned &= not (place % _LOADED_TOGETHER or elements % _LOADED_TOGETHER)
        rows.append([place, elements, begin])
        begin += triton.cdiv(elements, _BLOCK * _PARTS.value)
    device = gradients[0].device
    owners = _owners(tuple(row[1] for row in rows), device)
    table = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory()
    sums = torch.empty(begin, dtype=torch.float32, device=device)
    _square[(begin,)](
        table.to(device, non_blocking=True),
        owners,
        gradients[0],
        sums,
        ALIGNED=aligned,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return sums


@functools.lru_cache(maxsize=16)
def _owners(extents: tuple[int, ...], device: torch.device) -> Tensor:
    """Which tensor each program works at, int32."""
    programs = torch.tensor([triton.cdiv(n, _BLOCK * _PARTS.value) for n in extents])
    numbers = torch.arange(len(extents), dtype=torch.int32)
    return numbers.repeat_interleave(programs).to(device)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _square(  # type: ignore[no-untyped-def]
    table, owners, of_gradients, sums, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    row = table + tl.load(owners + program).to(tl.int64) * _COLUMNS
    gradient = tl.load(row).to(of_gradients.dtype)
    elements = tl.load(row + 1)
    if ALIGNED:
        gradient = tl.multiple_of(gradient, 16)
        elements = tl.multiple_of(elements, 16)
    begin = (program - tl.load(row + 2)) * (BLOCK * _PARTS)
    within = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(_PARTS):
        places = begin + part * BLOCK + within
        values = tl.load(gradient + places, mask=places < elements, other=0.0).to(tl.float32)
        total += values * values
    tl.store(sums + program, tl.sum(total, 0))
