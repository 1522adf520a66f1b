"""The least time that a training step can take: its GEMMs, attention and update at their rates.

Measured on the GPU it runs on, one operation at a time, at the sizes of the step: each GEMM forward
and the two backward (in FP8 and in bf16), causal flash attention both ways in bf16, and AdamW's
reading and writing at the rate of a copy. Norms, activations, casts, residuals and the loss are
left out: what a step takes beyond this floor is theirs, and that of everything that is not perfect.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from peers.work import GPU as DEVICE
from peers.work import Work
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_REPEATS = 8
_COPIED = 2**30


def floor(work: Work) -> dict[str, float]:
    """Milliseconds of a step with ``fp8`` and with ``bf16`` GEMMs, and what they are made of."""
    shape = work.dimensions
    hidden, mlp, layers = shape.hidden, shape.mlp, shape.layers
    head_dim = hidden // shape.heads
    joined = hidden + 2 * shape.kv_heads * head_dim
    tokens = work.rows * work.length
    gemms = [  # (outputs, inputs, how often)
        (joined, hidden, layers),
        (hidden, hidden, layers),
        (2 * mlp, hidden, layers),
        (hidden, mlp, layers),
        (shape.vocabulary, hidden, 1),
    ]
    parameters = sum(outputs * inputs * count for outputs, inputs, count in gemms)
    if not shape.tied:
        parameters += shape.vocabulary * hidden
    found = {
        f"gemms_{kind}": sum(
            count * sum(_gemms(tokens, outputs, inputs, fp8=kind == "fp8"))
            for outputs, inputs, count in gemms
        )
        for kind in ("fp8", "bf16")
    }
    found["attention"] = layers * _attention(work, shape.heads, shape.kv_heads, head_dim)
    # Weight, gradient and two moments are read, all but the gradient written; the gradient once
    # more for the norm.
    found["update"] = parameters * 8 * work.dtype.itemsize / _bytes_a_millisecond()
    rest = found["attention"] + found["update"]
    return {"fp8": found["gemms_fp8"] + rest, "bf16": found["gemms_bf16"] + rest, **found}


def _gemms(tokens: int, outputs: int, inputs: int, *, fp8: bool) -> list[float]:
    """Forward, gradient of the input, gradient of the weight: milliseconds."""
    sizes = [(tokens, inputs, outputs), (tokens, outputs, inputs), (outputs, tokens, inputs)]
    return [_gemm(*size, fp8=fp8, backward=number > 0) for number, size in enumerate(sizes)]


def _gemm(rows: int, inner: int, columns: int, *, fp8: bool, backward: bool) -> float:
    a = torch.randn(rows, inner, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(columns, inner, device=DEVICE, dtype=torch.bfloat16)
    if not fp8:
        return _milliseconds(lambda: a @ b.t())
    one = torch.ones((), device=DEVICE)
    first = a.to(torch.float8_e5m2 if backward else torch.float8_e4m3fn)
    second = b.to(torch.float8_e4m3fn)

    def product() -> Tensor:
        return torch._scaled_mm(
            first,
            second.t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.bfloat16,
            # As Transformer Engine: sums in full precision backward.
            use_fast_accum=not backward,
        )

    return _milliseconds(product)


def _attention(work: Work, heads: int, kv_heads: int, head_dim: int) -> float:
    """Forward and backward of one layer: the fastest of the kernels that PyTorch has."""

    def drawn(count: int) -> Tensor:
        shape = (work.rows, count, work.length, head_dim)
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()

    query, key, value = drawn(heads), drawn(kv_heads), drawn(kv_heads)
    along = torch.randn_like(query)

    def both() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.autograd.grad(output, (query, key, value), along)

    times = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            times.append(_milliseconds(both))
    return min(times)


def _bytes_a_millisecond() -> float:
    """Read and written by a copy."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * _COPIED / _milliseconds(lambda: target.copy_(source))


def _milliseconds(call: Callable[[], Any]) -> float:
    """The median of some runs, after two to warm up."""
    marks = []
    for _ in range(_REPEATS + 3):
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        marks.append(mark)
        call()
    torch.cuda.synchronize()
    spans: list[float] = [first.elapsed_time(second) for first, second in pairwise(marks)]
    return statistics.median(spans[2:])
