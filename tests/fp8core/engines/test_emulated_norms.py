"""The emulated engine's norms against float64 formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core.engines import NormDescription
from fp8core.engines.emulated import EmulatedEngine

Make = Callable[..., EmulatedEngine]
EPS = 1e-5
SHAPES = [(32,), (4, 8)]


def describe(
    kind: Any,
    shape: tuple[int, ...] = (32,),
    zero_centered: bool = False,
    bias: bool = True,
    affine: bool = True,
    dtype: torch.dtype = torch.float32,
) -> NormDescription:
    generator = torch.Generator().manual_seed(0)
    middle = 0.0 if zero_centered else 1.0
    weight = nn.Parameter((torch.randn(shape, generator=generator) * 0.2 + middle).to(dtype))
    offset = nn.Parameter((torch.randn(shape, generator=generator) * 0.2).to(dtype))
    return NormDescription(
        kind,
        shape,
        EPS,
        weight if affine else None,
        offset if affine and bias else None,
        zero_centered,
    )


def formula(norm: NormDescription, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm in float64, differentiable, from its definition."""
    dims = tuple(range(-len(norm.normalized_shape), 0))
    if norm.kind == "layer_norm":
        centred = x - x.mean(dims, keepdim=True)
        y = centred / (centred**2).mean(dims, keepdim=True).add(norm.eps).sqrt()
    else:
        y = x / (x**2).mean(dims, keepdim=True).add(norm.eps).sqrt()
    if weight is not None:
        y = y * (1 + weight if norm.zero_centered else weight)
    return y if bias is None else y + bias


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("form", ["weight and bias", "weight", "neither"])
def test_forward_and_backward(
    delayed: Make, kind: str, shape: tuple[int, ...], zero_centered: bool, form: str
) -> None:
    norm = describe(kind, shape, zero_centered, form == "weight and bias", form != "neither")
    engine = delayed(None)
    assert engine.norm_refusal(norm) is None
    layer = engine.convert_norm(norm, "norm")
    generator = torch.Generator().manual_seed(1)
    input = (torch.randn(6, *shape, generator=generator) * 3 + 1).requires_grad_()
    grad = torch.randn(6, *shape, generator=generator)
    with engine.training_context():
        output = layer(input)
    output.backward(grad)

    exact = input.detach().double().requires_grad_()
    leaves = [
        None if p is None else p.detach().double().requires_grad_()
        for p in (norm.weight, norm.bias)
    ]
    expected = formula(norm, exact, *leaves)
    expected.backward(grad.double())
    pairs = [(output, expected), (input.grad, exact.grad)]
    pairs += [
        (parameter.grad, leaf.grad)
        for parameter, leaf in zip((norm.weight, norm.bias), leaves, strict=True)
        if parameter is not None and leaf is not None
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_computed_in_fp32_and_left_in_the_compute_dtype(delayed: Make, kind: str) -> None:
    # A mean of 1000 and a spread of 1: bf16 arithmetic could not tell the values apart.
    norm = describe(kind)
    layer = delayed().convert_norm(norm, "norm")
    input = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)) + 1000
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(input)
    assert output.dtype == torch.bfloat16
    expected = formula(norm, input.double(), norm.weight.double(), norm.bias.double())
    # bf16 has 8 bits; fp32's own error at a mean of 1000 is about 1e-4.
    assert ((output - expected).abs() <= expected.abs() * 2.0**-8 + 3e-4).all()


def test_without_autocast_the_dtype_is_the_weights(delayed: Make) -> None:
    engine = delayed()
    for dtype in (torch.float32, torch.bfloat16):
        layer = engine.convert_norm(describe("rms_norm", dtype=dtype), "norm")
        assert layer(torch.randn(2, 32, dtype=torch.float16)).dtype == dtype
    plain = engine.convert_norm(describe("layer_norm", affine=False), "norm")
    assert plain(torch.randn(2, 32, dtype=torch.float16)).dtype == torch.float16


def test_the_parameters_are_the_originals(delayed: Make) -> None:
    norm = describe("layer_norm")
    layer = delayed().convert_norm(norm, "norm")
    assert layer.weight is norm.weight
    assert layer.bias is norm.bias
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert list(delayed().convert_norm(describe("rms_norm", bias=False), "n").state_dict()) == [
        "weight"
    ]
