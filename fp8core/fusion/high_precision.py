"""The parts of a fused block without FP8: PyTorch's GEMMs, with kernels of our own between them.

What is fused is everything between the GEMMs, each in one pass over memory: norms, the split and
rotation of q, k and v, the gated activation. The weights of q, k and v are one GEMM, and so are
those of gate and up. They need Triton, which comes with PyTorch for CUDA, and nothing else.
Attention over whole rows is Transformer Engine's where that is installed, else PyTorch's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8core.conversion.norms import describe_norm
from fp8core.engines.protocol import NormDescription
from fp8core.fusion.flash import flash_attention
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
from fp8core.fusion.te_attention import TEAttention
from fp8core.fusion.turns import Turns

__all__ = [
    "HighPrecisionParts",
    "PyTorchAttention",
    "active",
    "normalise",
    "raise_unless_taken",
    "refusal",
]

_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Of whole rows, the fastest first."""


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no block is fused on ``device`` that computes in ``dtype``, or None."""
    if device.type != "cuda":
        return "blocks are fused without FP8 on CUDA devices only"
    if dtype != torch.bfloat16:
        named = str(dtype).removeprefix("torch.")
        return f"blocks are fused without FP8 in bfloat16 only, and this computes in {named}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, in which the kernels of fused blocks are written"
    return None


class HighPrecisionParts:
    """`BlockParts` that compute in ``dtype``, under autocast, on a CUDA device."""

    kinds: ClassVar[Mapping[str, str]] = {
        "norm_linear": "NormLinear",
        "linear": "Linear",
        "norm_mlp": "NormMLP",
    }
    mlp_in_one: ClassVar[bool] = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._turns = Turns()

    def norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> Kernel:
        return NormLinear(norm, linears, self._dtype)

    def norm_linear_and_norm(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> NormedKernel:
        return NormLinear(norm, linears, self._dtype, and_norm=True)

    def linears(self, linears: Sequence[NamedLinear], name: str) -> Kernel:
        return JoinedLinear(linears)

    def linear(self, linear: NamedLinear) -> Kernel:
        return linear.module

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        return NormMLP(half, self._dtype)

    def active(self, inner: Tensor, activation: Activation) -> Tensor:
        return active(inner, activation)

    def norm_mlp_and_norm(self, half: MLPHalf) -> NormedKernel:
        return NormMLP(half, self._dtype, and_norm=True)

    def head_norm(self, half: AttentionHalf, name: str) -> Kernel:
        own = half.module.get_submodule(name)
        norm = describe_norm(own)
        if isinstance(norm, str):
            raise TypeError(norm)
        raise_unless_taken(norm)
        as_it_stands = own_head_norm(half, name)

        def kernel(heads: Tensor) -> Tensor:
            if half.module._modules[name] is not own:
                return as_it_stands(heads)
            return normalise(heads, norm, self._dtype)

        return kernel

    def attention(self, half: AttentionHalf) -> Attend:
        return _by_transformer_engine(half) or PyTorchAttention(half)

    def split_rotated(
        self, joined: Tensor, half: AttentionHalf, angles: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        from fp8core.fusion.rotary_kernel import split_rotated, takes  # needs Triton

        if takes(joined, half.head_dim):
            cosines, sines = self._turns.of(angles, sequences)
            return split_rotated(joined, cosines, sines, half.heads, half.kv_heads)
        query, key, value = split_heads(joined, half)
        query, key = (self.rotate(part, angles, sequences) for part in (query, key))
        return query, key, value

    def rotate(self, heads: Tensor, angles: Tensor, sequences: Sequences) -> Tensor:
        from fp8core.fusion.rotary_kernel import rotated, takes  # needs Triton

        cosines, sines = self._turns.of(angles, sequences)
        if takes(heads, heads.shape[-1]):
            return rotated(heads, cosines, sines)
        # The kernel takes widths of powers of two alone.
        by_angle = heads.float().reshape(-1, len(cosines), *heads.shape[2:])
        first, second = by_angle.chunk(2, dim=-1)
        cosine, sine = cosines[:, None, :], sines[:, None, :]
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        return turned.view(heads.shape).to(heads.dtype)

    def forget(self, names: Iterable[str]) -> None:
        """Nothing is kept of them."""

    def high_precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", dtype=self._dtype)


def _by_transformer_engine(half: AttentionHalf) -> Attend | None:
    """Its attention, for PyTorch's may load another cuDNN, beside which its own cannot be."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        return TEAttention(half)
    # An installation that is broken fails in its own way, and nothing else here needs it.
    except Exception:
        return None


class PyTorchAttention:
    """`Attend` of one block, by PyTorch's own kernels."""

    def __init__(self, half: AttentionHalf) -> None:
        self._half = half

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        half, window = self._half, self._half.window
        if window is not None and window >= sequences.length:
            window = None  # it hides nothing, and kernels without one are faster
        if sequences.bounds is not None or window is not None:
            output = flash_attention(
                query,
                key,
                value,
                sequences,
                dropout=half.dropped,
                scale=half.scale,
                window=window,
                causal=half.causal,
            )
            return output.flatten(2)
        with sdpa_kernel(_KERNELS, set_priority=True):
            output = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                dropout_p=half.dropped,
                is_causal=half.causal,
                scale=half.scale,
                enable_gqa=half.heads != half.kv_heads,
            )
        return output.transpose(1, 2).flatten(2)


class JoinedLinear(nn.Module):
    """Several Linears of one input, as one GEMM."""

    def __init__(self, linears: Sequence[NamedLinear]) -> None:
        super().__init__()
        self._linears = tuple(linears)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *joined(self._linears))


class NormLinear(nn.Module):
    """Several Linears of one normalised input, as one GEMM; ``and_norm``: and that input."""

    def __init__(
        self,
        norm: NormDescription,
        linears: Sequence[NamedLinear],
        dtype: torch.dtype,
        *,
        and_norm: bool = False,
    ) -> None:
        super().__init__()
        raise_unless_taken(norm)
        self._linears = tuple(linears)
        self._norm, self._dtype, self._and_norm = norm, dtype, and_norm

    def forward(self, x: Tensor) -> Any:
        normalised = normalise(x, self._norm, self._dtype)
        output = F.linear(normalised, *joined(self._linears))
        return (output, normalised) if self._and_norm else output


class NormMLP(nn.Module):
    """An MLP of a normalised input, in two GEMMs; ``and_norm``: and that input."""

    def __init__(self, half: MLPHalf, dtype: torch.dtype, *, and_norm: bool = False) -> None:
        super().__init__()
        raise_unless_taken(half.norm)
        self._half, self._dtype, self._and_norm = half, dtype, and_norm

    def forward(self, x: Tensor) -> Any:
        half = self._half
        normalised = normalise(x, half.norm, self._dtype)
        inner = F.linear(normalised, *joined(half.inputs))
        activated = active(inner, half.activation)
        output = F.linear(activated, half.down.weight, half.down.bias)
        return (output, normalised) if self._and_norm else output


def active(inner: Tensor, activation: Activation) -> Tensor:
    """As `BlockParts.active`, in one kernel."""
    if activation == "gelu":
        return F.gelu(inner, approximate="tanh")
    if activation == "gelu_erf":
        return F.gelu(inner)
    from fp8core.fusion.gated_kernel import gated  # needs Triton

    return gated(inner, activation)


def normalise(x: Tensor, norm: NormDescription, dtype: torch.dtype) -> Tensor:
    """``x``, normalised in one pass over memory, in ``dtype``."""
    from fp8core.fusion.norm_kernel import normalised  # needs Triton

    return normalised(x, norm, dtype)


def raise_unless_taken(norm: NormDescription) -> None:
    """ValueError for a norm that `normalise` has no kernel for."""
    from fp8core.fusion.norm_kernel import takes  # needs Triton

    if not takes(norm):
        raise ValueError(f"no kernel takes norms over {norm.normalized_shape}")
