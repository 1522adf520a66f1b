"""The layers of the emulated engine: a Linear whose three GEMMs run in FP8, and its norms.

A Linear has three GEMMs, each of two operands:

    fprop:  output      = input x weight^T         [tokens, in]  x [out, in]
    dgrad:  grad_input  = grad_output x weight     [tokens, out] x [out, in]
    wgrad:  grad_weight = grad_output^T x input    [tokens, out] x [tokens, in]

An FP8 GEMM multiplies FP8 values, sums in fp32, multiplies by the two inverse scales, adds the
bias and rounds once to the activation's dtype. Products of FP8 values are exact in fp32, so only
the order of summation tells it from a tensor core. Roundings at the edges are those of Transformer
Engine (seen in its traces on an H200): input and weight are cast from the dtype they arrive in, the
bias is rounded to the activation dtype, and gradients leave in that dtype too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8core.engines.gemm_watch import announced
from fp8core.engines.protocol import NormDescription
from fp8core.numerics.casts import decode

__all__ = ["EmulatedLinear", "EmulatedNorm", "LinearPass", "PassSource", "QuantizedTensor"]


@dataclass(frozen=True)
class QuantizedTensor:
    """FP8 ``codes`` and what undoes their scale; ``may_hold_nan`` as in ``casts.Amax``."""

    codes: Tensor
    inverse_scale: Tensor
    may_hold_nan: bool


class LinearPass(Protocol):
    """One forward pass of one Linear, and the backward pass that belongs to it."""

    override: tuple[bool, bool, bool]
    """Which of fprop, dgrad, wgrad run in high precision."""

    def quantize(self, tensor: Tensor, role: str) -> QuantizedTensor:
        """Casts the ``input``, ``weight`` or ``grad_output``, and notes its amax where due."""
        ...


class PassSource(Protocol):
    """Where a Linear learns how it is to run now."""

    def linear_pass(self, name: str) -> LinearPass | None:
        """How the Linear ``name`` runs this time; None for high precision."""
        ...


class EmulatedLinear(nn.Linear):
    """A Linear over another's own Parameters that computes as its engine says.

    Inside the engine's training context that is FP8; anywhere else it is an ordinary Linear.
    """

    def __init__(self, linear: nn.Linear, name: str, source: PassSource) -> None:
        # Built without storage: the Parameters are the other's own and nothing is allocated.
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)
        self._name = name
        self._source = source

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the autocast or input dtype."""
        linear_pass = self._source.linear_pass(self._name)
        if linear_pass is None:
            return super().forward(input)
        dtype = _activation_dtype(input.device, input.dtype)
        return _Float8Linear.apply(input, self.weight, self.bias, linear_pass, dtype)


class EmulatedNorm(nn.Module):
    """LayerNorm or RMSNorm over given Parameters: computed in fp32, left in the compute dtype.

    The result has the autocast dtype where autocast is on, else the weight's, as Transformer
    Engine's norms do (PyTorch's LayerNorm returns fp32 under autocast).
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, norm: NormDescription) -> None:
        super().__init__()
        self.kind = norm.kind
        self.normalized_shape = norm.normalized_shape
        self.eps = norm.eps
        self.zero_centered = norm.zero_centered
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)

    def forward(self, input: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` to the same shape."""
        own = input.dtype if self.weight is None else self.weight.dtype
        dtype = _activation_dtype(input.device, own)
        with torch.autocast(input.device.type, enabled=False):
            weight = None if self.weight is None else self.weight.float()
            bias = None if self.bias is None else self.bias.float()
            if self.zero_centered and weight is not None:
                weight = weight + 1.0
            values = input.float()
            if self.kind == "layer_norm":
                normed = nn.functional.layer_norm(
                    values, self.normalized_shape, weight, bias, self.eps
                )
                return normed.to(dtype)
            dims = tuple(range(-len(self.normalized_shape), 0))
            normed = values * torch.rsqrt(values.square().mean(dims, keepdim=True) + self.eps)
            normed = normed if weight is None else normed * weight
            return (normed if bias is None else normed + bias).to(dtype)

    def extra_repr(self) -> str:
        shape = list(self.normalized_shape)
        return f"{self.kind}, {shape}, eps={self.eps}, zero_centered={self.zero_centered}"


class _Float8Linear(torch.autograd.Function):
    """The three GEMMs of a Linear, each in FP8 or, where overridden, in the activation dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        linear_pass: LinearPass,
        dtype: torch.dtype,
    ) -> Tensor:
        fprop_high, dgrad_high, wgrad_high = linear_pass.override
        needs_input_grad, needs_weight_grad = ctx.needs_input_grad[:2]
        with torch.autocast(input.device.type, enabled=False):
            given = input.reshape(-1, input.shape[-1])
            flat = given.to(dtype) if fprop_high or wgrad_high else given
            input_fp8 = weight_fp8 = None
            if not (fprop_high and wgrad_high):
                input_fp8 = linear_pass.quantize(given, "input")
            if not (fprop_high and dgrad_high):
                weight_fp8 = linear_pass.quantize(weight, "weight")

            if fprop_high or input_fp8 is None or weight_fp8 is None:
                output = nn.functional.linear(
                    flat, weight.to(dtype), None if bias is None else bias.to(dtype)
                )
            else:
                output = _scaled_product(
                    input_fp8, _values(input_fp8), weight_fp8, _values(weight_fp8).t(), bias, dtype
                )

        # What the backward GEMMs need, as codes (one byte an element) or in high precision.
        saved: list[Tensor | None] = [None, None]
        if needs_weight_grad:
            saved[0] = flat if wgrad_high or input_fp8 is None else input_fp8.codes
        if needs_input_grad:
            saved[1] = weight if dgrad_high or weight_fp8 is None else weight_fp8.codes
        ctx.save_for_backward(*saved)
        ctx.input_fp8 = None if input_fp8 is None else _without_codes(input_fp8)
        ctx.weight_fp8 = None if weight_fp8 is None else _without_codes(weight_fp8)
        ctx.linear_pass = linear_pass
        ctx.dtype = dtype
        ctx.input_shape, ctx.input_dtype = input.shape, input.dtype
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        _, dgrad_high, wgrad_high = ctx.linear_pass.override
        needs_input_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        saved_input, saved_weight = ctx.saved_tensors
        dtype: torch.dtype = ctx.dtype
        grad_input = grad_weight = grad_bias = None
        with torch.autocast(grad_output.device.type, enabled=False):
            flat = grad_output.reshape(-1, grad_output.shape[-1]).to(dtype)
            if needs_bias_grad:
                grad_bias = flat.sum(0, dtype=torch.float32).to(dtype).to(ctx.bias_dtype)
            dgrad_fp8 = needs_input_grad and not dgrad_high
            wgrad_fp8 = needs_weight_grad and not wgrad_high
            if dgrad_fp8 or wgrad_fp8:
                grad_fp8 = ctx.linear_pass.quantize(flat, "grad_output")
                grad_values = _values(grad_fp8)
            if needs_input_grad:
                if dgrad_fp8:
                    other = _with_codes(ctx.weight_fp8, saved_weight)
                    grad_input = _scaled_product(
                        grad_fp8, grad_values, other, _values(other), None, dtype
                    )
                else:
                    grad_input = flat @ saved_weight.to(dtype)
                grad_input = grad_input.to(ctx.input_dtype).reshape(ctx.input_shape)
            if needs_weight_grad:
                if wgrad_fp8:
                    other = _with_codes(ctx.input_fp8, saved_input)
                    grad_weight = _scaled_product(
                        grad_fp8, grad_values.t(), other, _values(other), None, dtype
                    )
                else:
                    grad_weight = flat.t() @ saved_input
                grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _scaled_product(
    left: QuantizedTensor,
    left_values: Tensor,
    right: QuantizedTensor,
    right_values: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    with announced(left.codes, right.codes):
        product = left_values @ right_values
    product.mul_(left.inverse_scale * right.inverse_scale)
    if bias is not None:
        product += bias.to(dtype)
    return product.to(dtype)


def _values(quantized: QuantizedTensor) -> Tensor:
    return decode(quantized.codes, may_hold_nan=quantized.may_hold_nan)


def _without_codes(quantized: QuantizedTensor) -> tuple[Tensor, bool]:
    # The codes themselves travel as saved tensors, where checkpointing and offloading find them.
    return quantized.inverse_scale, quantized.may_hold_nan


def _with_codes(rest: tuple[Tensor, bool], codes: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes, *rest)


def _activation_dtype(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return otherwise
