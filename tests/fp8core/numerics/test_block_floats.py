"""Floats of 8 bits with a shared exponent: their grid, their rounding, their ends."""

from __future__ import annotations

import pytest
import torch

from fp8core.numerics.block_floats import (
    BLOCK,
    MOMENT,
    ROOT,
    BlockFormat,
    block_count,
    decode,
    encode,
)

KINDS = pytest.mark.parametrize("kind", [MOMENT, ROOT], ids=lambda kind: kind.name)


def rounded(values: torch.Tensor, kind: BlockFormat, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return decode(*encode(values, kind, generator), kind)


def drawn(kind: BlockFormat, *shape: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    return values if kind.signed else values.abs()


@KINDS
def test_every_code_is_a_number_of_its_own_by_hand(kind: BlockFormat) -> None:
    top = 127 if kind.signed else 255
    codes = torch.arange(BLOCK, dtype=torch.uint8)
    exponent = 130  # of numbers from 8 on
    values = decode(codes, torch.tensor([exponent], dtype=torch.uint8), kind)
    steps = 2**kind.mantissa
    for code in range(1, top + 1):
        octave, part = divmod(code, steps)
        by_hand = (1 + part / steps) * 2.0 ** (exponent - 127 - 15 + octave)
        assert values[code] == by_hand
        if kind.signed:
            assert values[code | 128] == -by_hand
    assert values[0] == 0
    assert values[top] == 16 - 8 / steps  # the last number below 16


@KINDS
def test_what_was_decoded_is_encoded_to_the_same_numbers_again(kind: BlockFormat) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        values = drawn(kind, 37, 101)
        # Just below a power of two: the largest of a block may be rounded up to it, or down.
        values[:, 0] = 8 - 2.0**-20
        codes, exponents = encode(values, kind, generator)
        assert (codes.dtype, codes.shape) == (torch.uint8, values.shape)
        assert exponents.shape == (block_count(values.numel()),)
        numbers = decode(codes, exponents, kind)
        again = encode(numbers, kind, generator)
        assert torch.equal(decode(*again, kind), numbers)
        for made, before in zip(encode(numbers, kind, generator), again, strict=True):
            assert torch.equal(made, before)


@KINDS
def test_rounding_goes_to_a_neighbour_and_is_right_on_average(kind: BlockFormat) -> None:
    values = drawn(kind, 4, BLOCK) + (0 if kind.signed else 0.01)
    # Half of the sixteen octaves, so that no value is below them.
    values = torch.where(values.abs() < 2.0**-8, 2.0**-8, values)
    spacing = 2.0 ** (values.abs().log2().floor() - kind.mantissa)
    total = torch.zeros_like(values, dtype=torch.float64)
    tries = 400
    for seed in range(tries):
        found = rounded(values, kind, seed)
        assert ((found - values).abs() < spacing).all()
        total += found
    bias = (total / tries - values) / spacing
    # Of a mean of 400 numbers from 0 to 1 the deviation is 0.025 at most; of 1024 means, 0.0008.
    assert float(bias.abs().max()) < 0.025 * 6
    assert abs(float(bias.mean())) < 0.0008 * 6


def test_what_is_far_below_its_block_is_no_divisor_of_zero() -> None:
    values = torch.ones(BLOCK)
    values[3], values[4] = 1e-9, 0.0
    found = rounded(values, ROOT)
    assert found[3] == 2.0**-15 * (1 + 1 / 16)  # the smallest code
    assert found[4] == 0
    assert rounded(-values, MOMENT)[3] == 0
    assert rounded(-values, MOMENT)[0] == -1


@KINDS
def test_a_block_does_not_feel_another(kind: BlockFormat) -> None:
    small = torch.full((BLOCK,), 1e-12)
    beside = torch.cat([torch.full((BLOCK,), 1e12), small])
    torch.testing.assert_close(rounded(beside, kind)[BLOCK:], small, rtol=0.13, atol=0)


@KINDS
def test_zeros_the_smallest_and_the_largest_numbers(kind: BlockFormat) -> None:
    assert torch.equal(rounded(torch.zeros(3, 5), kind), torch.zeros(3, 5))
    assert rounded(torch.zeros(0, 4), kind).shape == (0, 4)
    tiny = rounded(torch.full((2,), 1e-42), kind)  # subnormal in fp32
    assert torch.isfinite(tiny).all()
    assert float(tiny.max()) < 2e-38
    large = rounded(torch.full((2,), torch.finfo(torch.float32).max), kind)
    assert torch.isfinite(large).all()
    assert float(large.min()) > 3e38
