"""The parts of a fused block in Transformer Engine's modules and kernels.

The modules hold the very Parameters of the block's layers; they stand outside the module tree, so
names and state dicts stay those of the plain model. The engine keeps their FP8 state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8core.conversion.weight_views import plain_linear, see_transposed
from fp8core.engines.protocol import NormDescription
from fp8core.engines.te_modules import adds_bias_apart, as_gemms_read_them
from fp8core.engines.te_norms import choose_kernels
from fp8core.engines.te_saving import keep_columns_only
from fp8core.engines.weight_casts import WeightCasts
from fp8core.fusion import high_precision
from fp8core.fusion.joined import join
from fp8core.fusion.parts import (
    Activation,
    Attend,
    AttentionHalf,
    Kernel,
    MLPHalf,
    NamedLinear,
    NormedKernel,
    own_head_norm,
    split_heads,
)
from fp8core.fusion.sequences import Sequences
from fp8core.fusion.te_attention import TEAttention, fp8_refusal
from fp8core.fusion.turns import Turns

__all__ = ["FP8Attention", "TEParts"]

Register = Callable[[str, Any, tuple[str, ...]], None]
"""(name, module, names of its GEMMs): an engine takes a fused module's FP8 state over."""


@dataclass(frozen=True)
class FP8Attention:
    """What an engine lends to attention in FP8.

    ``context``: Transformer Engine's, of the recipe; ``after_backward``: it makes new scales of the
    gradients' amaxes. ``register`` takes the FP8 state of a module of this name over.
    ``forget_all``: Transformer Engine forgets all modules that it has seen.
    """

    context: Callable[[], AbstractContextManager[Any]]
    after_backward: Callable[[], None]
    register: Callable[[str, Any], None]
    forget_all: Callable[[], None]


class TEParts:
    """`BlockParts` of one te engine. ``convert_linear``: the engine's own, for single Linears."""

    kinds: ClassVar[Mapping[str, str]] = {
        "norm_linear": "LayerNormLinear",
        "linear": "Linear",
        "norm_mlp": "LayerNormMLP",
    }
    mlp_in_one: ClassVar[bool] = True
    _weight_dtype: torch.dtype | None = None
    """What the GEMMs are given the weights in, where that is not their own (`make_linear`)."""

    def __init__(
        self,
        register: Register,
        forget: Callable[[Iterable[str]], None],
        convert_linear: Callable[[nn.Linear, str], nn.Module],
        casts: WeightCasts,
        compute_dtype: torch.dtype,
        fp8_attention: FP8Attention | None,
    ) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        self._te = te
        self._rotate = apply_rotary_pos_emb
        self._register = register
        self._forget = forget
        self._convert_linear = convert_linear
        self._casts = casts
        self._compute_dtype = compute_dtype
        self._fp8_attention = fp8_attention
        self._fp8_refusals: dict[Hashable, str | None] = {}
        self._attentions: dict[str, TEAttention] = {}
        self._turns = Turns()

    def norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> Kernel:
        kernel: Kernel = self._norm_linear(norm, linears, name, and_norm=False)
        return kernel

    def norm_linear_and_norm(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> NormedKernel:
        kernel: NormedKernel = self._norm_linear(norm, linears, name, and_norm=True)
        return kernel

    def _norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str, *, and_norm: bool
    ) -> Any:
        assert norm.weight is not None
        first = linears[0]
        layer = _class("LayerNormLinear")(
            first.in_features,
            sum(linear.out_features for linear in linears),
            **_norm_arguments(norm),
            return_layernorm_output=and_norm,
            bias=first.bias is not None,
            parameters_split={f"part{i}": lin.out_features for i, lin in enumerate(linears)},
            params_dtype=first.parameter.dtype,
            device="meta",
            name=name,
        )
        _take_norm(layer, norm)
        for index, linear in enumerate(linears):
            setattr(layer, f"part{index}_weight", linear.parameter)
            if linear.bias is not None:
                setattr(layer, f"part{index}_bias", linear.bias)
        self._finish(layer, name, {"": linears})
        return layer

    def linears(self, linears: Sequence[NamedLinear], name: str) -> Kernel:
        first = linears[0]
        layer = _class("Linear")(
            first.in_features,
            sum(linear.out_features for linear in linears),
            bias=first.bias is not None,
            params_dtype=first.parameter.dtype,
            device="meta",
            name=name,
        )
        # It takes no several Parameters in the place of one where it is made without storage.
        places: list[str] = []
        for kind, names in (("weight", layer.weight_names), ("bias", layer.bias_names)):
            layer._parameters.pop(kind, None)
            names[:] = [f"part{index}_{kind}" for index in range(len(linears))]
            places += names
        values = [lin.parameter for lin in linears] + [lin.bias for lin in linears]
        for place, value in zip(places, values, strict=True):
            if value is not None:
                nn.Module.register_parameter(layer, place, value)
        self._finish(layer, name, {"": linears})
        kernel: Kernel = layer
        return kernel

    def linear(self, linear: NamedLinear) -> Kernel:
        if isinstance(linear.module, nn.Linear):
            return self._convert_linear(linear.module, linear.name)
        layer = self._convert_linear(plain_linear(linear.weight, linear.bias), linear.name)
        see_transposed(layer, linear.parameter)
        return layer

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        kernel: Kernel = self._norm_mlp(half, and_norm=False)
        return kernel

    def norm_mlp_and_norm(self, half: MLPHalf) -> NormedKernel:
        kernel: NormedKernel = self._norm_mlp(half, and_norm=True)
        return kernel

    def _norm_mlp(self, half: MLPHalf, *, and_norm: bool) -> Any:
        first, down = half.inputs[0], half.down
        layer = _class("LayerNormMLP")(
            first.in_features,
            first.out_features,
            **_norm_arguments(half.norm),
            bias=first.bias is not None,
            activation=half.activation,
            return_layernorm_output=and_norm,
            params_dtype=first.parameter.dtype,
            device="meta",
            name=half.group,
        )
        _take_norm(layer, half.norm)
        # Perhaps two Parameters in the place of one; `_get_weight_tensors` joins them.
        del layer._parameters["fc1_weight"]
        for index, linear in enumerate(half.inputs):
            nn.Module.register_parameter(layer, f"fc1_part{index}_weight", linear.parameter)
        layer.fc2_weight = down.parameter
        if first.bias is not None:
            layer.fc1_bias, layer.fc2_bias = first.bias, down.bias
        self._finish(layer, half.group, dict(zip(half.gemms, (half.inputs, [down]), strict=True)))
        return layer

    def active(self, inner: Tensor, activation: Activation) -> Tensor:
        return high_precision.active(inner, activation)

    def head_norm(self, half: AttentionHalf, name: str) -> Kernel:
        return own_head_norm(half, name)

    def _finish(self, layer: Any, name: str, gemms: Mapping[str, Sequence[NamedLinear]]) -> None:
        """``gemms``: what the name of each adds to ``name``, and the Linears that it joins."""
        layer.__dict__["_weight_casts"] = self._casts
        layer.__dict__["_weight_dtype"] = self._weight_dtype
        layer.__dict__["_gemm_linears"] = tuple(gemms.values())
        layer.__dict__["_cast_weights"] = tuple(
            linear.parameter for linears in gemms.values() for linear in linears
        )
        self._register(name, layer, tuple(gemms))

    def attention(self, half: AttentionHalf) -> Attend:
        self._attentions[half.name] = attention = TEAttention(half)
        return attention

    @property
    def fp8_attention(self) -> bool:
        return self._fp8_attention is not None

    def fp8_attention_refusal(self, half: AttentionHalf) -> str | None:
        fp8 = self._fp8_attention
        if fp8 is None:
            return "the recipe does not ask for it"
        if half.dropout is not None and half.dropout.p:
            return "it drops weights out, which is done in bf16"
        # Attention has no weights: what holds of one block holds of those that are like it.
        alike = (half.heads, half.kv_heads, half.head_dim, half.scale, half.window, half.causal)
        if alike not in self._fp8_refusals:
            device = half.o.parameter.device
            self._fp8_refusals[alike] = fp8_refusal(half, fp8.context, fp8.after_backward, device)
            fp8.forget_all()
        refusal = self._fp8_refusals[alike]
        if refusal is None:
            attention = self._attentions[half.name]
            attention.in_fp8 = True
            fp8.register(half.core_name, attention.core)
        return refusal

    def split_rotated(
        self, joined: Tensor, half: AttentionHalf, angles: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        from fp8core.fusion.rotary_kernel import split_rotated, takes  # needs Triton

        if takes(joined, half.head_dim):
            cosines, sines = self._turns.of(angles, sequences)
            quantizer = self._attentions[half.name].quantizer(sequences)
            if quantizer is not None:
                from fp8core.fusion.rotary_fp8_kernel import split_rotated_in_fp8

                return split_rotated_in_fp8(
                    joined, cosines, sines, half.heads, half.kv_heads, quantizer
                )
            return split_rotated(joined, cosines, sines, half.heads, half.kv_heads)
        query, key, value = split_heads(joined, half)
        query, key = (self.rotate(part, angles, sequences) for part in (query, key))
        return query, key, value

    def rotate(self, heads: Tensor, angles: Tensor, sequences: Sequences) -> Tensor:
        if sequences.bounds is None:
            rotated: Tensor = self._rotate(
                heads, angles[:, None, None, :], tensor_format="bshd", fused=True
            )
            return rotated
        # As one row with angles of each token's own: the kernel that takes bounds starts a block
        # for every token of the longest row in each of the sequences, of which there are many.
        row: Tensor = self._rotate(
            heads.flatten(0, 1)[None],
            self._turns.of_tokens(angles, sequences)[:, None, None, :],
            tensor_format="bshd",
            fused=True,
        )
        return row.view(heads.shape)

    def forget(self, names: Iterable[str]) -> None:
        self._forget(names)

    def high_precision(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(torch.autocast("cuda", dtype=self._compute_dtype))
        stack.enter_context(self._te.autocast(enabled=False))
        return stack


def _norm_arguments(norm: NormDescription) -> dict[str, Any]:
    choose_kernels(norm)
    return {
        "eps": norm.eps,
        "normalization": "LayerNorm" if norm.kind == "layer_norm" else "RMSNorm",
        "zero_centered_gamma": norm.zero_centered,
    }


def _take_norm(layer: Any, norm: NormDescription) -> None:
    if norm.kind == "layer_norm" and norm.bias is None:
        raise ValueError("Transformer Engine's LayerNorm always has a bias; this one has none")
    if norm.kind == "rms_norm" and norm.bias is not None:
        raise ValueError("Transformer Engine's RMSNorm has no bias; this one has one")
    layer.layer_norm_weight = norm.weight
    if norm.bias is not None:
        layer.layer_norm_bias = norm.bias


def _nothing_before_it_is_trained(layer: Any, inp: Tensor) -> bool:
    """Whether ``LayerNormMLP`` would ask a bias that there is not whether it is trained.

    It does where neither the input nor the norm's weight needs a gradient (``requires_dgrad`` in
    Transformer Engine 2.20.2's ``layernorm_mlp.py``), as in frozen blocks below those trained, and
    an RMSNorm has no bias.
    """
    return (
        torch.is_grad_enabled()
        and layer.layer_norm_bias is None
        and not inp.requires_grad
        and not layer.layer_norm_weight.requires_grad
    )


@functools.cache
def _class(name: str) -> Any:
    """``te.Linear``, ``LayerNormLinear`` or ``LayerNormMLP`` that asks about kept casts."""
    import transformer_engine.pytorch as te

    base = getattr(te, name)

    def forward(self: Any, inp: Tensor) -> Any:
        first = self._weight_casts.is_first(self.name, *self._cast_weights)
        last = self._gemm_linears[-1]  # the bias of an MLP's first GEMM has its gradient anyway
        self.gemm_bias_unfused_add = adds_bias_apart(
            (linear.parameter for linear in last), (linear.bias for linear in last)
        )
        if name == "LayerNormMLP" and _nothing_before_it_is_trained(self, inp):
            if not any(parameter.requires_grad for parameter in self.parameters()):
                with torch.no_grad():
                    return base.forward(self, inp, is_first_microbatch=first)
            inp = inp.detach().requires_grad_()
        return base.forward(self, inp, is_first_microbatch=first)

    def weights(self: Any) -> list[Tensor]:
        """One for each GEMM."""
        joined = [join([linear.weight for linear in linears]) for linears in self._gemm_linears]
        return as_gemms_read_them(joined, in_fp8=self.fp8, dtype=self._weight_dtype)

    def weight_quantizers(self: Any) -> list[Any]:
        return keep_columns_only(base._get_weight_quantizers(self))

    members: dict[str, Any] = {
        "forward": forward,
        "_get_weight_tensors": weights,
        "_get_weight_quantizers": weight_quantizers,
        "__module__": __name__,
    }
    return type(f"Octrain{name}", (base,), members)
