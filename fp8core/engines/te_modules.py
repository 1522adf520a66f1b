"""Transformer Engine's layers as this project uses them, made when first asked for.

They add no pickled ``_extra_state`` to the model's state dict (the engine's own ``state_dict``
holds the histories and scales as tensors), and a Linear learns from the engine whether its last
cast of the weight still holds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.engines.protocol import NormDescription
from fp8core.engines.te_norms import choose_kernels
from fp8core.engines.te_saving import keep_columns_only
from fp8core.engines.te_state import gemms_of
from fp8core.engines.te_stored import values_of
from fp8core.engines.weight_casts import WeightCasts

__all__ = ["adds_bias_apart", "as_gemms_read_them", "kept_casts", "make_linear", "make_norm"]


def make_linear(
    linear: nn.Linear, name: str, casts: WeightCasts, weight_dtype: torch.dtype | None = None
) -> Any:
    """A ``te.Linear`` over the Parameters of ``linear``; nothing is allocated.

    ``weight_dtype``: what its GEMMs are given the weight in, where that is not its own. With
    ``backward_override: high_precision`` Transformer Engine multiplies gradients in bf16 with the
    weight as it came, and has no GEMM of bf16 with fp32.
    """
    layer = _class("Linear")(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device="meta",
        name=name,
    )
    layer.weight = linear.weight
    if linear.bias is not None:
        layer.bias = linear.bias
    layer.__dict__["_weight_casts"] = casts
    layer.__dict__["_weight_dtype"] = weight_dtype
    return layer


def make_norm(norm: NormDescription) -> Any:
    """A ``te.LayerNorm`` or ``te.RMSNorm`` over the Parameters of ``norm``, which has a weight."""
    assert norm.weight is not None
    choose_kernels(norm)
    layer = _class("LayerNorm" if norm.kind == "layer_norm" else "RMSNorm")(
        norm.normalized_shape,
        eps=norm.eps,
        zero_centered_gamma=norm.zero_centered,
        device="meta",
        dtype=norm.weight.dtype,
    )
    layer.weight = norm.weight
    if norm.bias is not None:
        layer.bias = norm.bias
    return layer


def as_gemms_read_them(
    weights: list[Any], *, in_fp8: bool, dtype: torch.dtype | None = None
) -> list[Any]:
    """The same values row after row in memory, where the GEMMs read the weights themselves.

    ``dtype``: in which those of the backward pass read them beside the cast; None: they read that.

    Transformer Engine's GEMMs take a tensor's address and its shape, never its strides: of the view
    of a weight that the model keeps transposed they would read other values, and raise nothing.
    Casts to FP8 go by the strides, and a copy made for them would be kept for the backward pass.
    Nor do they know a weight that lies in FP8, of which they are given the values.
    """
    weights = weights if in_fp8 and dtype is None else [values_of(weight) for weight in weights]
    if dtype is not None:
        return [weight.contiguous().to(dtype) for weight in weights]
    return weights if in_fp8 else [weight.contiguous() for weight in weights]


def adds_bias_apart(weights: Iterable[Tensor], biases: Iterable[Tensor | None]) -> bool:
    """Whether a layer is to add its bias behind its GEMM: where that is trained and no weight is.

    Wherever its backward pass is not in FP8, Transformer Engine takes the gradient of a bias from
    the GEMM of the weight's gradient, and gives none where no weight asks for that.
    """
    if not torch.is_grad_enabled():  # nor does a view of a trained weight ask for a gradient
        return False
    trained = any(bias is not None and bias.requires_grad for bias in biases)
    return trained and not any(weight.requires_grad for weight in weights)


def kept_casts(name: str, module: Any, casts: WeightCasts) -> Iterator[tuple[str, Any]]:
    """(layer, FP8 tensor) of those casts of weights that the next forward pass of ``module`` uses
    again; a fused module has one for each of its GEMMs (`gemms_of`)."""
    gemms = gemms_of(module)
    weights = module.__dict__.get("_cast_weights") or (module.weight,)
    if casts.reuses(name, *weights):
        keys = ("weight",) if len(gemms) == 1 else ("fc1_weight", "fc2_weight")
        for gemm, key in zip(gemms, keys, strict=True):
            yield name + gemm, module._fp8_workspaces[key]


@functools.cache
def _class(name: str) -> Any:
    import transformer_engine.pytorch as te

    base = getattr(te, name)
    members: dict[str, Any] = {
        "get_extra_state": nn.Module.get_extra_state,
        "set_extra_state": nn.Module.set_extra_state,
        "__module__": __name__,
    }
    if name == "Linear":

        def forward(self: Any, input: Tensor) -> Tensor:
            first = self._weight_casts.is_first(self.name, self.weight)
            self.gemm_bias_unfused_add = adds_bias_apart([self.weight], [self.bias])
            output: Tensor = base.forward(self, input, is_first_microbatch=first)
            return output

        def weights(self: Any) -> list[Any]:
            dtype = self.__dict__.get("_weight_dtype")  # not there while it is built
            given = base._get_weight_tensors(self)
            return as_gemms_read_them(given, in_fp8=self.fp8, dtype=dtype)

        def weight_quantizers(self: Any) -> list[Any]:
            return keep_columns_only(base._get_weight_quantizers(self))

        members["forward"] = forward
        members["_get_weight_tensors"] = weights
        members["_get_weight_quantizers"] = weight_quantizers
    return type(f"Octrain{name}", (base,), members)
