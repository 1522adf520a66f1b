"""As `rotary_kernel`, with the casts of FP8 attention in the same kernels. Needs Triton.

Transformer Engine's attention joins q, k and v again, casts them, and backward dequantizes the
gradients and joins those: five more passes. What comes out here is theirs to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["split_rotated_in_fp8"]

_WARPS = 4
_FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


def split_rotated_in_fp8(
    joined: Tensor, cosines: Tensor, sines: Tensor, heads: int, kv_heads: int, quantizer: Any
) -> tuple[Any, Any, Any]:
    """`split_rotated` as Transformer Engine's FP8 tensors.

    ``quantizer``: its ``Float8Quantizer`` for q, k and v together; its amax grows as in a cast of
    its own. The gradients of the three are FP8 tensors too, or plain ones.
    """
    found: tuple[Any, Any, Any] = _SplitRotatedInFP8.apply(  # type: ignore[no-untyped-call]
        joined, cosines, sines, heads, kv_heads, quantizer
    )
    return found


class _SplitRotatedInFP8(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        joined: Tensor,
        cosines: Tensor,
        sines: Tensor,
        heads: int,
        kv_heads: int,
        quantizer: Any,
    ):
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

        joined = joined.contiguous()
        rows, length, width = joined.shape
        head_dim = width // (heads + 2 * kv_heads)
        counts = (heads, kv_heads, kv_heads)
        parts = [
            torch.empty(rows, length, count, head_dim, dtype=torch.uint8, device=joined.device)
            for count in counts
        ]
        inverse = quantizer.scale.reciprocal().reshape(1)
        kind = _FORMATS[quantizer.dtype.name]
        if rows * length:
            _split[(rows * length,)](
                joined,
                *(part.view(kind) for part in parts),
                cosines,
                sines,
                cosines.shape[0],
                quantizer.scale,
                quantizer.amax,
                **_extents(heads, kv_heads, head_dim),
            )
        ctx.save_for_backward(cosines, sines)
        ctx.dtype = joined.dtype
        return tuple(
            Float8Tensor(
                shape=part.shape,
                dtype=joined.dtype,
                data=part,
                fp8_scale_inv=inverse,
                fp8_dtype=quantizer.dtype,
                quantizer=quantizer,
                device=part.device,
            )
            for part in parts
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cosines, sines = ctx.saved_tensors
        parts, inverses = zip(*map(_parts_of, gradients), strict=True)
        query, key, _ = parts
        rows, length, heads, head_dim = query.shape
        kv_heads = key.shape[2]
        joined = torch.empty(
            rows,
            length,
            (heads + 2 * kv_heads) * head_dim,
            dtype=ctx.dtype,
            device=query.device,
        )
        if rows * length:
            _join[(rows * length,)](
                joined,
                *parts,
                *inverses,
                cosines,
                sines,
                cosines.shape[0],
                **_extents(heads, kv_heads, head_dim),
            )
        return joined, None, None, None, None, None


def _parts_of(gradient: Any) -> tuple[Tensor, Tensor]:
    """Its elements, and what they are multiplied by (fp32, one element)."""
    if hasattr(gradient, "_fp8_dtype"):
        kind = _FORMATS[gradient._fp8_dtype.name]
        return gradient._data.contiguous().view(kind), gradient._scale_inv
    return gradient.contiguous(), torch.ones(1, dtype=torch.float32, device=gradient.device)


def _extents(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEADS_PADDED": triton.next_power_of_2(heads),
        "KV_PADDED": triton.next_power_of_2(kv_heads),
        "HALF": head_dim // 2,
        "num_warps": _WARPS,
    }


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _turned(  # type: ignore[no-untyped-def]
    source, times, cosine, sine, COUNT: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, kind
):
    """Both halves of ``COUNT`` heads that lie one after another, turned, rounded to ``kind``."""
    head = tl.arange(0, PADDED)[:, None]
    places = head * (2 * HALF) + tl.arange(0, HALF)[None, :]
    inside = (head < COUNT) & (places >= 0)
    first = tl.load(source + places, mask=inside, other=0.0).to(tl.float32) * times
    second = tl.load(source + places + HALF, mask=inside, other=0.0).to(tl.float32) * times
    first = first.to(kind.dtype.element_ty).to(tl.float32)
    second = second.to(kind.dtype.element_ty).to(tl.float32)
    low = (first * cosine - second * sine).to(kind.dtype.element_ty)
    high = (second * cosine + first * sine).to(kind.dtype.element_ty)
    return low, high, places, inside


@triton.jit  # type: ignore[untyped-decorator]
def _untouched(  # type: ignore[no-untyped-def]
    source, times, COUNT: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, kind
):
    head = tl.arange(0, PADDED)[:, None]
    places = head * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (head < COUNT) & (places >= 0)
    values = tl.load(source + places, mask=inside, other=0.0).to(tl.float32) * times
    return values.to(kind.dtype.element_ty), places, inside


@triton.jit  # type: ignore[untyped-decorator]
def _cast_turned(  # type: ignore[no-untyped-def]
    source,
    target,
    cosine,
    sine,
    scale,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Casts, and gives the largest absolute value."""
    low, high, places, inside = _turned(source, 1.0, cosine, sine, COUNT, PADDED, HALF, source)
    low, high = low.to(tl.float32), high.to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + places, (low * scale).to(kind), mask=inside)
    tl.store(target + places + HALF, (high * scale).to(kind), mask=inside)
    return tl.max(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _split(  # type: ignore[no-untyped-def]
    joined,
    query,
    key,
    value,
    cosines,
    sines,
    angles,
    scale,
    amax,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    angle = (token % angles) * HALF + tl.arange(0, HALF)
    cosine = tl.load(cosines + angle)[None, :]
    sine = tl.load(sines + angle)[None, :]
    times = tl.load(scale)
    q_joined = joined + token * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    k_joined = q_joined + HEADS * 2 * HALF
    v_joined = k_joined + KV_HEADS * 2 * HALF
    of_query = query + token * (HEADS * 2 * HALF)
    of_key = key + token * (KV_HEADS * 2 * HALF)
    of_value = value + token * (KV_HEADS * 2 * HALF)
    largest = _cast_turned(q_joined, of_query, cosine, sine, times, HEADS, HEADS_PADDED, HALF)
    other = _cast_turned(k_joined, of_key, cosine, sine, times, KV_HEADS, KV_PADDED, HALF)
    values, places, inside = _untouched(v_joined, 1.0, KV_HEADS, KV_PADDED, 2 * HALF, joined)
    values = values.to(tl.float32)
    tl.store(of_value + places, (values * times).to(value.dtype.element_ty), mask=inside)
    largest = tl.maximum(largest, tl.maximum(other, tl.max(tl.max(tl.abs(values), 1), 0)))
    tl.atomic_max(amax, largest, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    joined,
    query,
    key,
    value,
    of_query,
    of_key,
    of_value,
    cosines,
    sines,
    angles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    angle = (token % angles) * HALF + tl.arange(0, HALF)
    cosine = tl.load(cosines + angle)[None, :]
    sine = -tl.load(sines + angle)[None, :]
    q_joined = joined + token * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    k_joined = q_joined + HEADS * 2 * HALF
    v_joined = k_joined + KV_HEADS * 2 * HALF
    query += token * (HEADS * 2 * HALF)
    key += token * (KV_HEADS * 2 * HALF)
    value += token * (KV_HEADS * 2 * HALF)
    low, high, places, inside = _turned(
        query, tl.load(of_query), cosine, sine, HEADS, HEADS_PADDED, HALF, joined
    )
    tl.store(q_joined + places, low, mask=inside)
    tl.store(q_joined + places + HALF, high, mask=inside)
    low, high, places, inside = _turned(
        key, tl.load(of_key), cosine, sine, KV_HEADS, KV_PADDED, HALF, joined
    )
    tl.store(k_joined + places, low, mask=inside)
    tl.store(k_joined + places + HALF, high, mask=inside)
    values, places, inside = _untouched(
        value, tl.load(of_value), KV_HEADS, KV_PADDED, 2 * HALF, joined
    )
    tl.store(v_joined + places, values, mask=inside)
