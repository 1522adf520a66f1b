"""The parts of a fused block in PyTorch's own operations, on any device, in any dtype.

They compute what Transformer Engine's kernels compute, without FP8. The layout of joined weights,
rotation, masks and grouped heads are proved with them against transformers where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8core.engines.protocol import NormDescription
from fp8core.fusion.parts import (
    Activation,
    Attend,
    AttentionHalf,
    Kernel,
    MLPHalf,
    NamedLinear,
    NormedKernel,
    joined,
    own_head_norm,
    split_heads,
)
from fp8core.fusion.sequences import Sequences

__all__ = ["PlainParts", "plain_norm"]


class PlainParts:
    """`BlockParts` without an engine."""

    kinds: ClassVar[Mapping[str, str]] = {
        "norm_linear": "NormLinear",
        "linear": "Linear",
        "norm_mlp": "NormMLP",
    }
    mlp_in_one: ClassVar[bool] = True

    def norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> Kernel:
        return lambda x: F.linear(plain_norm(x, norm), *joined(linears))

    def norm_linear_and_norm(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> NormedKernel:
        def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
            normalised = plain_norm(x, norm)
            return F.linear(normalised, *joined(linears)), normalised

        return kernel

    def linears(self, linears: Sequence[NamedLinear], name: str) -> Kernel:
        return lambda x: F.linear(x, *joined(linears))

    def linear(self, linear: NamedLinear) -> Kernel:
        return lambda x: F.linear(x, linear.weight, linear.bias)

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        kernel = self.norm_mlp_and_norm(half)
        return lambda x: kernel(x)[0]

    def norm_mlp_and_norm(self, half: MLPHalf) -> NormedKernel:
        def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
            normalised = plain_norm(x, half.norm)
            inner = F.linear(normalised, *joined(half.inputs))
            active = self.active(inner, half.activation)
            return F.linear(active, half.down.weight, half.down.bias), normalised

        return kernel

    def active(self, inner: Tensor, activation: Activation) -> Tensor:
        if activation in ("gelu", "gelu_erf"):
            return F.gelu(inner, approximate="tanh" if activation == "gelu" else "none")
        gate, up = inner.chunk(2, dim=-1)
        silu = activation == "swiglu"
        return (F.silu(gate) if silu else F.gelu(gate, approximate="tanh")) * up

    def head_norm(self, half: AttentionHalf, name: str) -> Kernel:
        return own_head_norm(half, name)

    def attention(self, half: AttentionHalf) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
            output = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=sequences.mask(query.device, half.window, causal=half.causal),
                dropout_p=half.dropped,
                scale=half.scale,
                enable_gqa=half.heads != half.kv_heads,
            )
            return output.transpose(1, 2).flatten(2)

        return attend

    def split_rotated(
        self, joined: Tensor, half: AttentionHalf, angles: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = split_heads(joined, half)
        query, key = (self.rotate(part, angles, sequences) for part in (query, key))
        return query, key, value

    def rotate(self, heads: Tensor, angles: Tensor, sequences: Sequences) -> Tensor:
        turned = angles[sequences.positions(heads.device)][:, :, None, :]
        first, second = heads.float().chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        return (heads * turned.cos() + rotated * turned.sin()).to(heads.dtype)

    def forget(self, names: Iterable[str]) -> None:
        """Nothing is kept of them."""

    def high_precision(self) -> nullcontext[None]:
        return nullcontext()


def plain_norm(x: Tensor, norm: NormDescription) -> Tensor:
    """The formulas of ``NormDescription``, computed in fp32."""
    values = x.float()
    if norm.kind == "layer_norm":
        values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.eps)
    assert norm.weight is not None
    weight = norm.weight.float()
    values = values * (1.0 + weight if norm.zero_centered else weight)
    if norm.bias is not None:
        values = values + norm.bias.float()
    return values.to(x.dtype)
