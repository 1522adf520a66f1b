"""PyTorch's flash attention over the documents of packed rows.

Its memory goes by the tokens. cuDNN's kernels for sequences of unlike lengths, which Transformer
Engine takes, reserve for the backward pass as many rows as the longest sequence has for each of the
sequences: on an H200 32 GiB for 2 x 4096 tokens of short texts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8core.fusion.sequences import Sequences

__all__ = ["flash_attention", "takes"]

_HALF = (torch.bfloat16, torch.float16)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these tensors ``[B, heads, T, d]``."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _HALF
        and width == key.shape[-1] == value.shape[-1]
        and width % 8 == 0
        and width <= 256
        and query.shape[1] % key.shape[1] == 0
    )


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention within each sequence, to none behind it where ``causal``; ``window``: of its last
    tokens alone.

    query ``[B, T, heads, d]``, key and value ``[B, T, kv_heads, d]``, bf16 or fp16 on a GPU; gives
    ``[B, T, heads, d]``, contiguous.
    """
    tokens = [part.flatten(0, 1).contiguous() for part in (query, key, value)]
    bounds = sequences.bounds
    if bounds is None:
        # Made where they are used: a copy of numbers from the host would wait for the device.
        end, length = sequences.rows * sequences.length, sequences.length
        bounds = torch.arange(0, end + 1, length, dtype=torch.int32, device=query.device)
    output: Tensor = torch.ops.aten._flash_attention_forward(
        *tokens,
        bounds,
        bounds,
        sequences.length,
        sequences.length,
        dropout,
        causal,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return output.view(sequences.rows, sequences.length, *output.shape[1:])
