"""Queries, keys and values out of one joined product, rotated, in one kernel; and the way back.

Apart they are three copies forward, and backward two rotations and a concatenation. Imported where
Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotated", "split_rotated", "takes"]

_WARPS = 4


def takes(joined: Tensor, head_dim: int) -> bool:
    """Whether the kernel takes heads of this width: ranges in it are powers of two."""
    half = head_dim // 2
    return joined.is_cuda and 2 * half == head_dim and half >= 8 and half & (half - 1) == 0


def split_rotated(
    joined: Tensor, cosines: Tensor, sines: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[B, T, heads, d]``, k and v ``[B, T, kv_heads, d]`` of ``joined``, contiguous.

    ``joined``: ``[B, T, (heads + 2 * kv_heads) * d]``, q before k before v. ``cosines`` and
    ``sines``: fp32 ``[N, d / 2]``, contiguous; token n of all B * T is turned by those in row
    ``n % N``, the first half of a head's elements against the second. v is not turned.
    """
    found: tuple[Tensor, Tensor, Tensor] = _SplitRotated.apply(  # type: ignore[no-untyped-call]
        joined, cosines, sines, heads, kv_heads
    )
    return found


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """``heads`` ``[B, T, heads, d]`` turned, contiguous; the rest as of `split_rotated`."""
    found: Tensor = _Rotated.apply(heads, cosines, sines)  # type: ignore[no-untyped-call]
    return found


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(heads.contiguous(), cosines, sines, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _turned(gradients[0].contiguous(), *ctx.saved_tensors, backward=True), None, None


def _turned(heads: Tensor, cosines: Tensor, sines: Tensor, *, backward: bool) -> Tensor:
    rows, length, count, head_dim = heads.shape
    found = torch.empty_like(heads)
    if rows * length:
        _rotate[(rows * length,)](
            heads,
            found,
            cosines,
            sines,
            cosines.shape[0],
            COUNT=count,
            PADDED=triton.next_power_of_2(count),
            HALF=head_dim // 2,
            BACKWARD=backward,
            num_warps=_WARPS,
        )
    return found


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, joined: Tensor, cosines: Tensor, sines: Tensor, heads: int, kv_heads: int
    ):
        joined = joined.contiguous()
        rows, length, width = joined.shape
        head_dim = width // (heads + 2 * kv_heads)
        query = joined.new_empty(rows, length, heads, head_dim)
        key = joined.new_empty(rows, length, kv_heads, head_dim)
        value = torch.empty_like(key)
        _launch(joined, query, key, value, cosines, sines, backward=False)
        ctx.save_for_backward(cosines, sines)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cosines, sines = ctx.saved_tensors
        query, key, value = (gradient.contiguous() for gradient in gradients)
        rows, length, heads, head_dim = query.shape
        joined = query.new_empty(rows, length, (heads + 2 * key.shape[2]) * head_dim)
        _launch(joined, query, key, value, cosines, sines, backward=True)
        return joined, None, None, None, None


def _launch(
    joined: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor,
    sines: Tensor,
    *,
    backward: bool,
) -> None:
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    if rows * length == 0:
        return
    _split[(rows * length,)](
        joined,
        query,
        key,
        value,
        cosines,
        sines,
        cosines.shape[0],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEADS_PADDED=triton.next_power_of_2(heads),
        KV_PADDED=triton.next_power_of_2(kv_heads),
        HALF=head_dim // 2,
        BACKWARD=backward,
        num_warps=_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _turn(  # type: ignore[no-untyped-def]
    source,
    target,
    cosine,
    sine,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    """``COUNT`` heads that lie one after another, from ``source`` to ``target``."""
    head = tl.arange(0, PADDED)[:, None]
    places = head * (2 * HALF) + tl.arange(0, HALF)[None, :]
    inside = (head < COUNT) & (places >= 0)
    first = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + places + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + places, (first * cosine - second * sine).to(kind), mask=inside)
    tl.store(target + places + HALF, (second * cosine + first * sine).to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    source, target, COUNT: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr
):
    head = tl.arange(0, PADDED)[:, None]
    places = head * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (head < COUNT) & (places >= 0)
    tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _split(  # type: ignore[no-untyped-def]
    joined,
    query,
    key,
    value,
    cosines,
    sines,
    angles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    angle = (token % angles) * HALF + tl.arange(0, HALF)
    cosine = tl.load(cosines + angle)[None, :]
    sine = tl.load(sines + angle)[None, :]
    q_joined = joined + token * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    k_joined = q_joined + HEADS * 2 * HALF
    v_joined = k_joined + KV_HEADS * 2 * HALF
    q_apart = query + token * (HEADS * 2 * HALF)
    k_apart = key + token * (KV_HEADS * 2 * HALF)
    v_apart = value + token * (KV_HEADS * 2 * HALF)
    if BACKWARD:
        _turn(q_apart, q_joined, cosine, -sine, HEADS, HEADS_PADDED, HALF)
        _turn(k_apart, k_joined, cosine, -sine, KV_HEADS, KV_PADDED, HALF)
        _copy(v_apart, v_joined, KV_HEADS, KV_PADDED, 2 * HALF)
    else:
        _turn(q_joined, q_apart, cosine, sine, HEADS, HEADS_PADDED, HALF)
        _turn(k_joined, k_apart, cosine, sine, KV_HEADS, KV_PADDED, HALF)
        _copy(v_joined, v_apart, KV_HEADS, KV_PADDED, 2 * HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    heads,
    found,
    cosines,
    sines,
    angles,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    angle = (token % angles) * HALF + tl.arange(0, HALF)
    cosine = tl.load(cosines + angle)[None, :]
    sine = tl.load(sines + angle)[None, :]
    if BACKWARD:
        sine = -sine
    own = token * (COUNT * 2 * HALF)
    _turn(heads + own, found + own, cosine, sine, COUNT, PADDED, HALF)
