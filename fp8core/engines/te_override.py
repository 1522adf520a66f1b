"""A Linear over Transformer Engine's casts and GEMMs in which each GEMM's precision is chosen.

Transformer Engine 2 dropped ``override_linear_precision``; its recipes reach only some of the eight
tuples and, with delayed scaling, none without its debug path. This module runs the three GEMMs of a
Linear itself: a GEMM named by the override takes the operands as they are (bf16), the others take
what Transformer Engine's own quantizer makes of them and run in its own FP8 GEMM, with the same
accumulator choices as ``te.Linear`` (split accumulation in dgrad and wgrad, not in fprop).

As in ``te.Linear``, an operand is quantised from the dtype it arrives in: fp32 weights under bf16
autocast go to FP8 in one rounding, and their amax is that of the fp32 values.

An operand is quantised only where a GEMM reads it in FP8, so the amax history of an operand that
no GEMM quantises stays empty and its scale stays 1.

What the backward pass needs is saved as plain tensors, where gradient checkpointing finds it. The
recomputation of a block asks for quantizers again; the engine gives those of the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Override = tuple[bool, bool, bool]
"""(fprop, dgrad, wgrad); True runs that GEMM in high precision."""

QuantizerFactory = Callable[[str], Any]
"""Makes the quantizer of ``input``, ``weight`` or ``grad_output``, bound to its state."""


@dataclass(frozen=True)
class OperandUse:
    """Which operands some GEMM reads in FP8, and which of them also transposed."""

    input: bool
    input_transposed: bool
    weight: bool
    weight_transposed: bool
    grad_output: bool
    grad_output_transposed: bool

    @staticmethod
    def of(override: Override) -> OperandUse:
        fprop, dgrad, wgrad = (not high for high in override)
        return OperandUse(
            input=fprop or wgrad,
            input_transposed=wgrad,
            weight=fprop or dgrad,
            weight_transposed=dgrad,
            grad_output=dgrad or wgrad,
            grad_output_transposed=wgrad,
        )


class _ChosenGemms(nn.Module):
    """``y = x W^T + b`` with FP8 GEMMs except those that ``override`` names.

    Args:
        override: (fprop, dgrad, wgrad), True is high precision; never all three.
        make_quantizer: asked at each forward pass, a recomputed one too, and each backward pass.
        is_enabled: whether FP8 is on now; where it is not, this is a plain Linear.
    """

    def __init__(
        self, override: Override, make_quantizer: QuantizerFactory, is_enabled: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.override = override
        self._make_quantizer = make_quantizer
        self._is_enabled = is_enabled

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        """``[out_features, in_features]`` and the bias ``[out_features]``, or None."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the autocast dtype."""
        weight, bias = self._weights()
        if not self._is_enabled():
            return nn.functional.linear(input, weight, bias)
        dtype = (
            torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else input.dtype
        )
        with torch.autocast("cuda", enabled=False):
            rows = input.reshape(-1, weight.shape[1])
            output = _ThreeGemms.apply(
                rows, weight, bias, dtype, self.override, self._make_quantizer
            )
        return output.view(*input.shape[:-1], weight.shape[0])

    def extra_repr(self) -> str:
        weight, bias = self._weights()
        names = [
            n for n, high in zip(("fprop", "dgrad", "wgrad"), self.override, strict=True) if high
        ]
        return (
            f"in_features={weight.shape[1]}, out_features={weight.shape[0]}, "
            f"bias={bias is not None}, high_precision={'+'.join(names)}"
        )


class OverrideLinear(_ChosenGemms):
    """A Linear over Parameters of its own: ``weight`` ``[out_features, in_features]``, which it
    shares with the layer that is replaced, and ``bias`` ``[out_features]`` or None."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        override: Override,
        make_quantizer: QuantizerFactory,
        is_enabled: Callable[[], bool],
    ) -> None:
        super().__init__(override, make_quantizer, is_enabled)
        self.weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = weight.shape

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias


class JoinedOverrideLinear(_ChosenGemms):
    """Several Linears of one input as one: ``weights`` gives theirs, side by side, at each pass."""

    def __init__(
        self,
        weights: Callable[[], tuple[Tensor, Tensor | None]],
        override: Override,
        make_quantizer: QuantizerFactory,
        is_enabled: Callable[[], bool],
    ) -> None:
        super().__init__(override, make_quantizer, is_enabled)
        self._joined = weights

    @property
    def weight(self) -> Tensor:
        return self._joined()[0]

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        return self._joined()


class _ThreeGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        override: Override,
        make_quantizer: QuantizerFactory,
    ) -> Tensor:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.quantized_tensor import prepare_for_saving

        use = OperandUse.of(override)
        cast_bias = None if bias is None else bias.to(dtype)
        quantized_rows = quantized_weight = None
        if use.input:
            quantized_rows = _quantize(make_quantizer("input"), rows, use.input_transposed)
        if use.weight:
            quantized_weight = _quantize(make_quantizer("weight"), weight, use.weight_transposed)
        if override[0]:
            output = nn.functional.linear(rows.to(dtype), weight.to(dtype), cast_bias)
        else:
            output = general_gemm(
                quantized_weight, quantized_rows, out_dtype=dtype, layout="TN", bias=cast_bias
            )[0]
        ctx.override = override
        ctx.make_quantizer = make_quantizer
        ctx.use = use
        ctx.input_dtype = rows.dtype
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if use.input_transposed and quantized_rows is not None:
            # wgrad reads the transposed copy alone.
            quantized_rows.update_usage(rowwise_usage=False, columnwise_usage=True)
        saved, ctx.tensor_objects = prepare_for_saving(
            rows.to(dtype) if override[2] else None,
            weight if override[1] else None,
            quantized_rows if use.input_transposed else None,
            quantized_weight if use.weight_transposed else None,
        )
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.quantized_tensor import restore_from_func_ctx

        rows, weight, quantized_rows, quantized_weight = restore_from_func_ctx(ctx)
        _, dgrad_high, wgrad_high = ctx.override
        grad_output = grad_output.contiguous()
        need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
        quantized_grad = None
        if ctx.use.grad_output:
            quantized_grad = _quantize(
                ctx.make_quantizer("grad_output"), grad_output, ctx.use.grad_output_transposed
            )
        grad_input = grad_weight = grad_bias = None
        if need_input:
            if dgrad_high:
                grad_input = grad_output @ weight.to(grad_output.dtype)
            else:
                grad_input = general_gemm(
                    quantized_weight,
                    quantized_grad,
                    out_dtype=grad_output.dtype,
                    layout="NN",
                    grad=True,
                    use_split_accumulator=True,
                )[0]
            grad_input = grad_input.to(ctx.input_dtype)
        if need_weight:
            if wgrad_high:
                grad_weight = grad_output.t() @ rows
            else:
                grad_weight = general_gemm(
                    quantized_rows,
                    quantized_grad,
                    out_dtype=grad_output.dtype,
                    layout="NT",
                    grad=True,
                    use_split_accumulator=True,
                )[0]
            grad_weight = grad_weight.to(ctx.weight_dtype)
        if need_bias and ctx.bias_dtype is not None:
            grad_bias = grad_output.sum(dim=0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def _quantize(quantizer: Any, tensor: Tensor, transposed: bool) -> Any:
    # Hopper's FP8 GEMM reads both operands along the reduced dimension, so dgrad and wgrad need
    # transposed copies; a copy made of the transpose alone is not implemented per tensor.
    quantizer.set_usage(rowwise=True, columnwise=transposed)
    # A bare container of plain tensors, which can be saved for the backward pass one by one.
    quantizer.internal = True
    return quantizer(tensor.contiguous())


def current_quantizer(recipe: Any, tensor: str, device: torch.device) -> Any:
    """That of current scaling for ``input``, ``weight`` or ``grad_output``."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    in_e5m2 = tensor == "grad_output" and recipe.fp8_format == "HYBRID"
    return Float8CurrentScalingQuantizer(
        tex.DType.kFloat8E5M2 if in_e5m2 else tex.DType.kFloat8E4M3,
        device,
        force_pow_2_scales=recipe.use_power_2_scales,
    )
