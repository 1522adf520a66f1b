"""Casts against the format's own definition (the conftest's reference), bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.numerics.casts import E4M3, E5M2, Float8Format, decode, measure_amax, quantize

ONE = torch.tensor(1.0)


def format_of(reference: Any) -> Float8Format:
    return {"E4M3": E4M3, "E5M2": E5M2}[reference.name]


def all_codes(reference: Any) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(reference.dtype)


def bits(values: torch.Tensor | np.ndarray) -> np.ndarray:
    """fp32 bit patterns, every NaN the same, so that -0 and 0 differ and NaN equals NaN."""
    array = np.asarray(values, dtype=np.float32).copy()
    array[np.isnan(array)] = np.nan
    return array.view(np.uint32)


def assert_same_cast(reference: Any, numbers: torch.Tensor, scale: torch.Tensor = ONE) -> None:
    codes = quantize(numbers, scale, format_of(reference))
    assert codes.dtype == reference.dtype
    assert codes.shape == numbers.shape
    with np.errstate(invalid="ignore"):  # signalling NaN patterns
        product = numbers.float().numpy() * np.float32(scale.item())  # one fp32 rounding
    expected = reference.cast(product)
    np.testing.assert_array_equal(bits(decode(codes)), bits(expected))


def test_the_largest_numbers() -> None:
    assert (E4M3.max, E5M2.max) == (448.0, 57344.0)


@pytest.mark.parametrize("contiguous", [True, False])
def test_every_code_decodes_to_its_value(reference_format: Any, contiguous: bool) -> None:
    codes = all_codes(reference_format).view(16, 16)
    values = np.array(reference_format.values)
    expected = np.concatenate([values, np.copysign(values, -1.0)]).reshape(16, 16)
    if not contiguous:
        codes, expected = codes.t(), expected.T
    np.testing.assert_array_equal(bits(decode(codes)), bits(expected))


def test_every_code_but_nan_decodes_the_fast_way(reference_format: Any) -> None:
    values = np.array(reference_format.values)
    expected = np.concatenate([values, np.copysign(values, -1.0)])
    decoded = decode(all_codes(reference_format), may_hold_nan=False)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(decoded)[numbers], bits(expected)[numbers])


def test_every_value_casts_to_its_own_code(reference_format: Any) -> None:
    codes = all_codes(reference_format)
    finite = torch.isfinite(decode(codes))
    again = quantize(decode(codes), ONE, format_of(reference_format))
    assert torch.equal(again.view(torch.uint8)[finite], codes.view(torch.uint8)[finite])


def test_midpoints_and_their_neighbours(reference_format: Any) -> None:
    finite = reference_format.finite.astype(np.float32)
    middle = (finite[:-1] + finite[1:]) / 2  # exact: FP8 numbers have few bits
    points = [finite, middle]
    points += [np.nextafter(p, np.float32(to)) for p in (finite, middle) for to in (0, np.inf)]
    positive = np.concatenate(points)
    assert_same_cast(reference_format, torch.from_numpy(np.concatenate([positive, -positive])))


def test_ties_go_to_even() -> None:
    # E4M3 between 16 and 32 has steps of 2: 17 lies between 16 (even) and 18, 19 between 18 and 20.
    ties = torch.tensor([17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10])
    assert decode(quantize(ties, ONE, E4M3)).tolist() == [16.0, 20.0, -16.0, 0.0, 2.0**-8]
    # E5M2 between 16 and 32 has steps of 4.
    assert decode(quantize(torch.tensor([18.0, 22.0]), ONE, E5M2)).tolist() == [16.0, 24.0]


def test_overflow_saturates_and_nan_stays(reference_format: Any) -> None:
    largest = reference_format.max
    beyond = torch.tensor([largest * 1.03, largest * 1.5, 1e30, math.inf, -math.inf, math.nan])
    values = decode(quantize(beyond, ONE, format_of(reference_format)))
    assert values[:5].tolist() == [largest, largest, largest, largest, -largest]
    assert values[5].isnan()


def test_every_16_bit_number(reference_format: Any) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    assert_same_cast(reference_format, patterns.view(torch.bfloat16))
    assert_same_cast(reference_format, patterns.view(torch.float16))


def test_random_fp32_bit_patterns(reference_format: Any) -> None:
    patterns = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint64)
    anything = torch.from_numpy(patterns.astype(np.uint32).view(np.float32))
    assert_same_cast(reference_format, anything)
    # Most patterns over- or underflow; these lie in the format's range, subnormals included.
    near = torch.from_numpy(np.random.default_rng(2).uniform(-18, 17, 200_000).astype(np.float32))
    assert_same_cast(reference_format, torch.exp2(near) * torch.sign(torch.randn(200_000)))


@pytest.mark.parametrize("size", [0, 1, 7, 16, 31, 33, 64, 100, 257])
def test_any_size_and_layout(reference_format: Any, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, 6, generator=generator) * 10
    for layout in (numbers, numbers.t(), numbers[:, ::2], numbers.bfloat16().t()):
        assert_same_cast(reference_format, layout, torch.tensor(3.7))


@settings(max_examples=200, deadline=None)
@given(
    number=st.floats(width=32, allow_nan=False),
    scale=st.floats(min_value=2.0**-126, max_value=2.0**127, width=32),
)
def test_the_product_is_rounded_once_to_fp32(number: float, scale: float) -> None:
    from_product = quantize(torch.tensor([number]), torch.tensor(scale), E4M3)
    with np.errstate(over="ignore", under="ignore"):
        product = np.float32(number) * np.float32(scale)
    itself = quantize(torch.tensor([float(product)]), ONE, E4M3)
    assert from_product.view(torch.uint8).item() == itself.view(torch.uint8).item()


def test_a_bf16_tensor_is_scaled_in_fp32() -> None:
    # 1.0634 lies just above 1.0625, the middle of E4M3's 1 and 1.125, and bf16 rounds it onto it.
    number = torch.tensor([1.0], dtype=torch.bfloat16)
    scale = torch.tensor(1.0634)
    assert (number * scale).item() == 1.0625  # what a product in bf16 would give: a tie, to 1.0
    assert decode(quantize(number, scale, E4M3)).item() == 1.125


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.0, -7.5], [3.0, 0.0]], dtype=dtype)
    assert measure_amax(tensor).value.dtype == torch.float32
    assert measure_amax(tensor).value.item() == 7.5
    assert measure_amax(tensor).may_hold_nan is False
    assert measure_amax(torch.zeros(3, dtype=dtype)).value.item() == 0.0
    assert measure_amax(torch.empty(0, 4, dtype=dtype)).value.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amax_drops_nan_and_keeps_infinity(dtype: torch.dtype) -> None:
    with_nan = measure_amax(torch.tensor([1.0, math.nan, -2.0], dtype=dtype))
    assert (with_nan.value.item(), with_nan.may_hold_nan) == (2.0, True)
    assert measure_amax(torch.tensor([math.nan], dtype=dtype)).value.item() == 0.0
    both = measure_amax(torch.tensor([math.nan, -math.inf, 1.0], dtype=dtype))
    assert both.value.item() == math.inf
    assert measure_amax(torch.tensor([-math.inf, 1.0], dtype=dtype)).value.item() == math.inf
