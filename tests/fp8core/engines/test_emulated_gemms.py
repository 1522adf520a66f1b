"""The three GEMMs of an emulated Linear against a float64 reference written here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8core.engines.emulated import EmulatedEngine

Make = Callable[..., EmulatedEngine]
OVERRIDES = list(itertools.product((False, True), repeat=3))
TOKENS, IN, OUT = 48, 64, 32


class Reference:
    """A Linear in float64 with the casts of current scaling, each GEMM in FP8 or not.

    ``rounding`` brings an array to the activation dtype (identity for fp32).
    """

    def __init__(self, formats: dict[str, Any], backward: str, rounding: Callable[..., Any]):
        self.forward_format, self.backward_format = formats["E4M3"], formats[backward]
        self.rounding = rounding

    def cast(self, tensor: np.ndarray, fmt: Any) -> np.ndarray:
        """What an FP8 tensor stands for: its values over its scale."""
        tensor = tensor.astype(np.float32)
        scale = np.float32(fmt.max) / np.abs(tensor).max()
        return fmt.cast(tensor * scale) * np.float64(np.float32(1) / scale)

    def run(
        self, input: Any, weight: Any, bias: Any, grad: Any, override: tuple[bool, bool, bool]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        # Input and weight are cast from the dtype they come in, the gradient comes in the layer's.
        x8, w8 = self.cast(input, self.forward_format), self.cast(weight, self.forward_format)
        input, grad = self.rounding(input), self.rounding(grad)
        g8 = self.cast(grad, self.backward_format)
        rounded = self.rounding(weight)
        input = self.rounding(input)
        output = (input @ rounded.T if override[0] else x8 @ w8.T) + self.rounding(bias)
        grad_input = grad @ rounded if override[1] else g8 @ w8
        grad_weight = grad.T @ input if override[2] else g8.T @ x8
        return output, grad_input, grad_weight, grad.sum(0)


def tensors(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(TOKENS, IN), (OUT, IN), (OUT,), (TOKENS, OUT)]
    spreads = [3.0, 0.05, 0.1, 1e-3]
    return tuple(
        torch.randn(shape, generator=generator) * spread
        for shape, spread in zip(shapes, spreads, strict=True)
    )


def run_layer(
    engine: EmulatedEngine, input: Any, weight: Any, bias: Any, grad: Any
) -> list[torch.Tensor]:
    linear = nn.Linear(IN, OUT)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    layer = engine.convert_linear(linear, "layer")
    leaf = input.clone().requires_grad_()
    with engine.training_context():
        output = layer(leaf)
    output.backward(grad.to(output.dtype))
    engine.after_backward()
    assert leaf.grad is not None
    return [output.detach(), leaf.grad, layer.weight.grad, layer.bias.grad]


def to_bf16(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(array)).bfloat16().double().numpy()


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_fp32_activations(
    current: Make,
    reference_formats: dict[str, Any],
    override: tuple[bool, bool, bool],
    fp8_format: str,
) -> None:
    engine = current(None, override_linear_precision=override, fp8_format=fp8_format)
    input, weight, bias, grad = tensors()
    got = run_layer(engine, input, weight, bias, grad)
    backward = "E5M2" if fp8_format == "HYBRID" else "E4M3"
    reference = Reference(reference_formats, backward, lambda array: array)
    arrays = [tensor.double().numpy() for tensor in (input, weight, bias, grad)]
    expected = reference.run(*arrays, override=override)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        # fp32 summation of up to 64 terms: a few units of 2^-24 of the largest sum.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_overridden_gemm_is_high_precision_and_no_other_is(
    current: Make, override: tuple[bool, bool, bool]
) -> None:
    engine = current(None, override_linear_precision=override)
    input, weight, bias, grad = tensors(3)
    got = run_layer(engine, input, weight, bias, grad)
    exact = [input @ weight.T + bias, grad @ weight, grad.T @ input]
    for high, ours, theirs in zip(override, got[:3], exact, strict=True):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        # E4M3 operands are off by about 2.5 % each, E5M2 by 5 %.
        assert error < 1e-6 if high else 0.01 < error < 0.1


@pytest.mark.parametrize("override", OVERRIDES)
def test_bf16_activations(
    current: Make, reference_formats: dict[str, Any], override: tuple[bool, bool, bool]
) -> None:
    engine = current(override_linear_precision=override)
    input, weight, bias, grad = tensors(1)
    got = run_layer(engine, input, weight, bias, grad)
    assert got[0].dtype == torch.bfloat16
    assert {tensor.dtype for tensor in got[1:]} == {torch.float32}  # as the leaves are
    reference = Reference(reference_formats, "E5M2", to_bf16)
    arrays = [tensor.double().numpy() for tensor in (input, weight, bias, grad)]
    expected = reference.run(*arrays, override=override)
    for ours, theirs in zip(got, expected, strict=True):
        values = ours.double().numpy()
        np.testing.assert_array_equal(values, to_bf16(values))  # gradients left in bf16 too
        # One rounding to bf16 (8 bits, so half a step is 2^-8) of a sum off by fp32 summation.
        bound = np.abs(theirs) * 2.0**-8 + 2e-6 * np.abs(theirs).max()
        assert (np.abs(values - theirs) <= bound).all()


def test_sums_that_are_exact_in_fp32_come_out_bit_for_bit(delayed: Make) -> None:
    # Small integers are E4M3 and E5M2 numbers at scale 1, and their sums are fp32 numbers: any
    # summation order gives the same, so all results are known to the bit. IN = 64, TOKENS = 48.
    generator = torch.Generator().manual_seed(5)
    input = torch.randint(-8, 9, (TOKENS, IN), generator=generator).float()
    weight = torch.randint(-8, 9, (OUT, IN), generator=generator).float()
    grad = torch.randint(-4, 5, (TOKENS, OUT), generator=generator).float()
    bias = torch.randint(-8, 9, (OUT,), generator=generator).float()
    got = run_layer(delayed(), input, weight, bias, grad)
    exact = [input @ weight.T + bias, grad @ weight, grad.T @ input, grad.sum(0)]
    for ours, theirs in zip(got, exact, strict=True):
        assert torch.equal(ours.float(), theirs.bfloat16().float())


def test_the_result_is_rounded_once(delayed: Make) -> None:
    # 16 products: 1 * 256 + 14 * 0 + 0.5 * 2 = 257, plus bias 0.0078125 (bf16, exact): 257.0078.
    # bf16 has steps of 2 at 256: 257 alone is a tie and would go to 256, then + bias stays 256;
    # the sum rounded once goes to 258.
    linear = nn.Linear(16, 16)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[:, 0], linear.weight[:, 1] = 256.0, 2.0
        linear.bias.fill_(0.0078125)
    engine = delayed()
    layer = engine.convert_linear(linear, "layer")
    input = torch.zeros(16, 16)
    input[:, 0], input[:, 1] = 1.0, 0.5
    with engine.training_context():
        assert layer(input).unique().tolist() == [258.0]


def test_input_and_weight_are_cast_from_the_dtype_they_come_in(delayed: Make) -> None:
    # 1.0634 is above the middle (1.0625) of E4M3's 1 and 1.125. bf16, under whose autocast this
    # runs, would round it onto the middle, and the tie would go to 1.
    for dtype, expected in ((torch.float32, 1.125), (torch.bfloat16, 1.0)):
        for weight, input in ((1.0634, 1.0), (1.0, 1.0634)):
            linear = nn.Linear(16, 16, bias=False)
            with torch.no_grad():
                linear.weight.copy_(torch.eye(16) * weight)
            engine = delayed()
            layer = engine.convert_linear(linear.to(dtype), "layer")
            with engine.training_context():
                output = layer(torch.full((16, 16), input, dtype=dtype))
            assert output.unique().tolist() == [expected]


def test_nan_and_infinity_reach_the_output(delayed: Make) -> None:
    engine = delayed()
    linear = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(16))
    layer = engine.convert_linear(linear, "layer")
    input = torch.ones(16, 16)
    input[0, 0], input[1, 0] = float("nan"), float("inf")
    with engine.training_context():
        output = layer(input)
    assert output[0].isnan().all()  # NaN times the zeros of the weight
    assert output[1, 0].item() == 448  # infinity saturates
    assert torch.equal(output[2:].float(), torch.ones(14, 16))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scaling_uses_this_very_tensor(current: Make, power_of_two: bool) -> None:
    # amax 10: scale 44.8, or 32 as a power of two. 1.03 * 44.8 = 46.14 -> 48 (steps of 4: 44, 48),
    # 48/44.8 = 1.0714; 1.03 * 32 = 32.96 -> 32: 1.0.
    engine = current(None, use_power_2_scales=power_of_two)
    linear = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(16))
    layer = engine.convert_linear(linear, "layer")
    input = torch.full((16, 16), 1.03)
    input[0, 0] = 10.0
    with engine.training_context():
        output = layer(input)
    assert output[1, 1].item() == pytest.approx(1.0 if power_of_two else 48 / 44.8, rel=1e-6)
    assert output[0, 0].item() == pytest.approx(10.0, rel=1e-6)


@pytest.mark.parametrize("shape", [(3, 16, 64), (2, 2, 8, 64), (64,), (0, 64)])
def test_any_leading_shape(current: Make, shape: tuple[int, ...]) -> None:
    engine = current()
    layer = engine.convert_linear(nn.Linear(64, 32), "layer")
    input = torch.randn(shape, requires_grad=True)
    with engine.training_context():
        output = layer(input)
    assert output.shape == (*shape[:-1], 32)
    output.float().sum().backward()
    assert input.grad is not None
    assert input.grad.shape == shape


def test_frozen_parameters_get_no_gradient_and_inputs_without_one_cost_no_gemm(
    delayed: Make,
) -> None:
    engine = delayed(amax_history_len=2)
    linear = nn.Linear(16, 16)
    linear.weight.requires_grad_(False)
    layer = engine.convert_linear(linear, "layer")
    with engine.training_context():
        output = layer(torch.ones(16, 16))
    output.sum().backward()
    engine.after_backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    # Neither dgrad nor wgrad was wanted, so grad_output was not cast.
    assert engine.state_dict()["layer.backward.scale"].tolist() == [1, 1]


def test_bf16_weights_train(delayed: Make) -> None:
    engine = delayed()
    layer = engine.convert_linear(nn.Linear(16, 16, dtype=torch.bfloat16), "layer")
    with engine.training_context():
        output = layer(torch.randn(16, 16))
    output.float().square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.bfloat16


def test_saved_operands_take_one_byte_an_element(delayed: Make) -> None:
    engine = delayed()
    layer = engine.convert_linear(nn.Linear(64, 32), "layer")
    kept: list[torch.Tensor] = []
    input = torch.randn(16, 64, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with engine.training_context(), hooks:
        layer(input)
    assert sorted(tensor.numel() * tensor.element_size() for tensor in kept) == [16 * 64, 32 * 64]
