"""SwiGLU and its casts in kernels of our own, as an activation of Transformer Engine's MLP.

Its ``LayerNormMLP`` finds the functions of an activation by its name: forward with the quantizer of
the second GEMM's input, backward, and backward with the quantizer of the first one's gradient. A
name of ours is added there, for MLPs without biases; all others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CAST_SWIGLU", "add_cast_swiglu"]

CAST_SWIGLU = "swiglu_cast_by_octrain"
_FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
# GPUs from 10.0 on read both operands of an FP8 GEMM in either order.
_NEED_BOTH_ORDERS = ((8, 9), (9, 0))


def add_cast_swiglu() -> bool:
    """Whether Transformer Engine knows `CAST_SWIGLU` now; on this GPU it may have no use."""
    from transformer_engine.pytorch.module import layernorm_mlp

    if torch.cuda.get_device_capability() not in _NEED_BOTH_ORDERS:
        return False
    theirs: Callable[..., Any] = layernorm_mlp._act_func
    if not hasattr(theirs, CAST_SWIGLU):

        def act_func(activation: str, recipe: Any = None) -> tuple[Any, Any, Any]:
            if activation != CAST_SWIGLU:
                found: tuple[Any, Any, Any] = theirs(activation, recipe)
                return found
            forward, backward, fused = theirs("swiglu", recipe)
            if recipe is None or not recipe.delayed():
                return forward, backward, fused
            return _forward, backward, _backward

        setattr(act_func, CAST_SWIGLU, theirs)
        layernorm_mlp._act_func = act_func
    return True


def _forward(joined: Tensor, quantizer: Any) -> Any:
    """In the place of ``tex.swiglu``."""
    import transformer_engine_torch as tex

    if not _takes(quantizer, joined):
        return tex.swiglu(joined, quantizer)
    from fp8core.fusion.swiglu_fp8_kernel import swiglu_in_fp8

    kind, both = _FORMATS[quantizer.dtype.name], quantizer.columnwise_usage
    made = swiglu_in_fp8(joined, quantizer.scale, quantizer.amax, kind, both=both)
    return _tensor(made, quantizer, joined.dtype)


def _backward(gradient: Tensor, joined: Tensor, quantizer: Any) -> tuple[None, Any]:
    """The gradient of a bias, of which there is none, and that of ``joined``."""
    import transformer_engine_torch as tex

    if not _takes(quantizer, joined, gradient):
        return None, quantizer(tex.dswiglu(gradient, joined, None))
    from fp8core.fusion.swiglu_fp8_kernel import swiglu_gradient_in_fp8

    kind, both = _FORMATS[quantizer.dtype.name], quantizer.columnwise_usage
    made = swiglu_gradient_in_fp8(
        gradient, joined, quantizer.scale, quantizer.amax, kind, both=both
    )
    return None, _tensor(made, quantizer, gradient.dtype)


def _takes(quantizer: Any, *tensors: Tensor) -> bool:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    return (
        type(quantizer) is Float8Quantizer
        and quantizer.internal
        and quantizer.rowwise_usage
        and all(tensor.dim() == 2 and tensor.is_contiguous() for tensor in tensors)
    )


def _tensor(made: tuple[Tensor, Tensor, Tensor], quantizer: Any, dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    data, other, inverse = made
    return Float8TensorStorage(
        data=data,
        fp8_scale_inv=inverse,
        fp8_dtype=quantizer.dtype,
        fake_dtype=dtype,
        data_transpose=other if quantizer.columnwise_usage else None,
        quantizer=quantizer,
    )
