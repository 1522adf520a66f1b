"""Floats of 8 bits in blocks that share an exponent, for the moments of an optimizer.

256 consecutive elements share one byte E, the exponent (as fp32 writes it) of the largest of them.
An element's code is the upper part of its own fp32 bits: four bits of exponent, of the sixteen
octaves up to E, then the mantissa. Code 0 is zero, and there are no subnormals.

* ``MOMENT``: a sign and three bits of mantissa, as E4M3. What is below the sixteen octaves is zero.
* ``ROOT``: of numbers that are never negative, four bits of mantissa in the sign's place. What is
  below the sixteen octaves, but no zero, has the smallest code: of a divisor, which must not vanish
  because a neighbour is large. Made for the root of Adam's second moment, whose sixteen octaves are
  thirty-two of the moment itself.

Rounding is stochastic and without bias within the sixteen octaves. A scale that is a power of two
costs no rounding of its own: what was decoded is encoded to the very same number again, whatever
the random bits (once to other codes, where the largest of a block was rounded down below the power
of two that it could have reached). Infinities and NaN have no code. The idea of block-wise states
is that of Dettmers et al. (arXiv:2110.02861), a shared exponent that of the OCP Microscaling
formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "MOMENT", "ROOT", "BlockFormat", "block_count", "decode", "encode"]

BLOCK = 256
OCTAVES = 16
# Exponents of a block, as fp32 writes them: the smallest element has one of 1 or more.
_SMALLEST, _LARGEST = OCTAVES, 254


@dataclass(frozen=True)
class BlockFormat:
    """``name``: in reports. ``mantissa``: its bits; the sign, where there is one, is bit 7."""

    name: str
    signed: bool
    mantissa: int

    @property
    def dropped(self) -> int:
        """How many of the lowest bits of an fp32 number have no place in a code."""
        return 23 - self.mantissa


MOMENT = BlockFormat("e4m3_block256", signed=True, mantissa=3)
ROOT = BlockFormat("ue4m4_block256", signed=False, mantissa=4)


def block_count(elements: int) -> int:
    """How many blocks, and bytes of exponents, ``elements`` numbers have."""
    return -(-elements // BLOCK)


def decode(codes: Tensor, exponents: Tensor, kind: BlockFormat) -> Tensor:
    """``codes`` (uint8, any shape) and ``exponents`` (uint8 [blocks]) as fp32 of the same shape."""
    code = _rows(codes.int())
    magnitude = code & 0x7F if kind.signed else code
    bits = (magnitude + _lowest(exponents, kind)) << kind.dropped
    values = torch.where(magnitude == 0, 0, bits).view(torch.float32)
    if kind.signed:
        values = torch.where(code > 127, -values, values)
    return values.flatten()[: codes.numel()].view(codes.shape)


def encode(
    values: Tensor, kind: BlockFormat, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """``values`` (fp32, finite, any shape) as codes (uint8, same shape) and exponents [blocks].

    ``generator``: of the random bits, on the device of ``values``.
    """
    rows = _rows(values)
    bits = rows.abs().view(torch.int32)
    # Of the largest as the largest random bits round it: none comes to lie above the largest code.
    largest = bits.amax(1) + (1 << kind.dropped) - 1
    exponents = (largest >> 23).clamp(_SMALLEST, _LARGEST)
    noise = torch.randint(
        0,
        1 << kind.dropped,
        bits.shape,
        dtype=torch.int32,
        device=bits.device,
        generator=generator,
    )
    code = ((bits + noise) >> kind.dropped) - _lowest(exponents, kind)
    if kind.signed:
        code = code.clamp(0, 127)
        code = torch.where((rows < 0) & (code > 0), code | 0x80, code)
    else:
        code = torch.where(bits == 0, 0, code.clamp(1, 255))
    codes = code.flatten()[: values.numel()].view(values.shape).to(torch.uint8)
    return codes, exponents.to(torch.uint8)


def _lowest(exponents: Tensor, kind: BlockFormat) -> Tensor:
    """By block [blocks, 1]: what is taken from an fp32 number's upper bits to make its code."""
    return (exponents.int()[:, None] - (OCTAVES - 1)) << kind.mantissa


def _rows(values: Tensor) -> Tensor:
    """As [blocks, BLOCK], the last filled up with zeros."""
    flat = values.reshape(-1)
    blocks = block_count(flat.numel())
    if blocks * BLOCK > flat.numel():
        flat = torch.nn.functional.pad(flat, (0, blocks * BLOCK - flat.numel()))
    return flat.view(blocks, BLOCK)
