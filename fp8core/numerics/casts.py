"""Casts to and from the two 8-bit floating-point formats, exact on every device.

Both formats are those of the OCP 8-bit floating point specification 1.0 (table 1), as Transformer
Engine uses them:

* E4M3: 4 exponent bits (bias 7), 3 mantissa bits, no infinity, one NaN a sign (code 0x7f); largest
  448, smallest normal 2^-6, smallest subnormal 2^-9.
* E5M2: 5 exponent bits (bias 15), 2 mantissa bits, IEEE infinities and NaN; largest finite 57344,
  smallest normal 2^-14, smallest subnormal 2^-16.

A cast rounds to nearest, ties to even, keeps the sign of zero and NaN, and saturates: whatever
lies beyond the largest finite number, an infinity too, becomes that number. This is what
``cvt.rn.satfinite`` does on a GPU. PyTorch's own casts differ in the last point (on a CPU E4M3
saturates and E5M2 overflows to infinity, on a GPU E4M3 overflows to NaN), so values are clamped
before the cast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["E4M3", "E5M2", "Amax", "Float8Format", "decode", "measure_amax", "quantize"]


@dataclass(frozen=True)
class Float8Format:
    """One FP8 format: its name, PyTorch's dtype for its codes, and its largest finite number."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = Float8Format("E4M3", torch.float8_e4m3fn, 448.0)
E5M2 = Float8Format("E5M2", torch.float8_e5m2, 57344.0)


@dataclass(frozen=True)
class Amax:
    """The largest absolute value of a tensor, and whether the tensor may hold a NaN.

    ``value`` is a 0-dim fp32 tensor; NaN elements do not count in it, infinities do, and it is 0
    for an empty tensor. ``may_hold_nan`` False is certain; True is only "not excluded", because
    to know better would make a GPU wait.
    """

    value: Tensor
    may_hold_nan: bool


def measure_amax(tensor: Tensor) -> Amax:
    """The amax of ``tensor`` (any shape; fp32, bf16 or fp16) as TE's cast kernels take it.

    They reduce with ``fmaxf``, which drops NaN: a NaN in the data never enters a history.
    """
    if tensor.numel() == 0:
        return Amax(torch.zeros((), dtype=torch.float32, device=tensor.device), False)
    if tensor.device.type != "cpu":
        return Amax(_amax_without_nan(tensor), True)
    low, high = torch.aminmax(tensor)
    value = torch.maximum(-low, high).float()
    if value.isnan():
        return Amax(_amax_without_nan(tensor), True)
    return Amax(value, False)


def quantize(tensor: Tensor, scale: Tensor, fmt: Float8Format) -> Tensor:
    """FP8 codes of ``tensor * scale``: product in fp32, then the saturating cast.

    ``tensor``: any shape, fp32, bf16 or fp16; ``scale``: 0-dim fp32. Returns a contiguous tensor
    of the same shape with dtype ``fmt.dtype``.
    """
    if tensor.dtype == torch.float32:
        scaled = tensor * scale
    else:
        scaled = tensor.float().mul_(scale)
    return scaled.clamp_(-fmt.max, fmt.max).to(fmt.dtype).contiguous()


def decode(codes: Tensor, *, may_hold_nan: bool = True) -> Tensor:
    """The fp32 values of FP8 ``codes`` (exact: every FP8 number is an fp32 and a bf16 number).

    ``may_hold_nan=False`` is a promise that allows a faster way on a CPU.
    """
    if codes.device.type != "cpu" or codes.dtype not in (E4M3.dtype, E5M2.dtype):
        return codes.float()
    wide = codes.view(torch.int8).to(torch.int16)
    if codes.dtype == E5M2.dtype:
        # E5M2 is fp16 without its lower eight mantissa bits; infinities and NaN carry over.
        return wide.bitwise_left_shift_(8).view(torch.float16).float()
    if may_hold_nan:
        return codes.float()
    # E4M3 in fp16's frame: the sign goes to bit 15 (the int8 was sign-extended; bit 14 has to be
    # cleared again), exponent and mantissa move up by 7. The exponent's bias is then 15 instead of
    # 7, so the number read is 2^-8 of the true one, subnormals too. Only NaN does not carry over.
    # PyTorch's own E4M3 decoding is not vectorised on a CPU and takes ten times as long.
    wide.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return wide.view(torch.float16).float().mul_(256.0)


def _amax_without_nan(tensor: Tensor) -> Tensor:
    return tensor.abs().float().nan_to_num(nan=0.0, posinf=float("inf")).amax()
