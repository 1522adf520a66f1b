"""The least time that a training step can take: its GEMMs, attention and update at their rates.

Measured on the device it runs on, one operation at a time, at the sizes of the step (`step_work`):
each GEMM forward and backward (in FP8 and in bf16), flash attention both ways in bf16, and AdamW's
reading and writing at the rate of a copy. Norms, activations, casts, residuals and the loss are
left out: what a step takes beyond this floor is theirs, and that of everything that is not perfect.
The FP8 floor has the head in FP8 too, whether or not a job has. A CPU's times mean nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from device_clock import DeviceClock
from peers.step_work import Attention, Product, StepWork
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["floor", "told"]

_WARM_UP, _REPEATS = 2, 8
_HELD = 40_000_000
"""Cycles of a GPU, some 20 ms: longer than the host takes to enqueue all runs of an operation."""
_COPIED, _COPIED_ON_A_CPU = 2**30, 2**24


def floor(step: StepWork, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step with ``fp8`` and with ``bf16`` GEMMs, and what they are made of."""
    found = {
        f"gemms_{kind}": sum(
            product.count * _gemm(product, device, fp8=kind == "fp8" and not product.bf16)
            for product in step.products
        )
        for kind in ("fp8", "bf16")
    }
    found["attention"] = step.attention.count * _attention(step.attention, device)
    found["update"] = step.updated_bytes / _bytes_a_millisecond(device)
    rest = found["attention"] + found["update"]
    return {"fp8": found["gemms_fp8"] + rest, "bf16": found["gemms_bf16"] + rest, **found}


def told(found: dict[str, float]) -> str:
    return ", ".join(f"{part} {value:.1f} ms" for part, value in found.items())


def _gemm(product: Product, device: torch.device, *, fp8: bool) -> float:
    a = torch.randn(product.rows, product.inner, device=device, dtype=torch.bfloat16)
    b = torch.randn(product.columns, product.inner, device=device, dtype=torch.bfloat16)
    if not fp8:
        return _milliseconds(lambda: a @ b.t(), device)
    one = torch.ones((), device=device)
    first = a.to(torch.float8_e5m2 if product.backward else torch.float8_e4m3fn)
    second = b.to(torch.float8_e4m3fn)

    def multiplied() -> Tensor:
        return torch._scaled_mm(
            first,
            second.t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.bfloat16,
            # As Transformer Engine: sums in full precision backward.
            use_fast_accum=not product.backward,
        )

    return _milliseconds(multiplied, device)


def _attention(of: Attention, device: torch.device) -> float:
    """Forward and backward of one layer: the fastest of the kernels that PyTorch has."""

    def drawn(count: int) -> Tensor:
        shape = (of.rows, count, of.length, of.head_dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()

    query, key, value = drawn(of.heads), drawn(of.kv_heads), drawn(of.kv_heads)
    along = torch.randn_like(query)

    def both() -> None:
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=of.causal, enable_gqa=True
        )
        torch.autograd.grad(output, (query, key, value), along)

    backends = [SDPBackend.FLASH_ATTENTION]
    if device.type == "cuda":
        backends.append(SDPBackend.CUDNN_ATTENTION)
    times = []
    for backend in backends:
        with sdpa_kernel(backend):
            times.append(_milliseconds(both, device))
    return min(times)


def _bytes_a_millisecond(device: torch.device) -> float:
    """Read and written by a copy."""
    size = _COPIED if device.type == "cuda" else _COPIED_ON_A_CPU
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _milliseconds(lambda: target.copy_(source), device)


def _milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median of some runs, after two to warm up.

    A GPU begins with them when all are enqueued: a small GEMM takes the host longer to launch than
    the GPU to compute, and the former is no part of a floor.
    """
    for _ in range(_WARM_UP):
        call()
    if device.type == "cuda":
        torch.cuda._sleep(_HELD)
    clock = DeviceClock(device)
    clock.mark()
    for _ in range(_REPEATS):
        call()
        clock.mark()
    return statistics.median(clock.milliseconds())
