"""Attention of one fused block by Transformer Engine: in bf16, or in FP8 where the recipe asks.

With ``fp8_dpa`` Transformer Engine casts q, k and v, and backward the gradient of the output, to
FP8, and cuDNN's FP8 kernels multiply them. The scales of delayed scaling are those of six tensors:
q, k and v together, the output, the probabilities, and the gradients of the three.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fp8core.fusion.flash import flash_attention
from fp8core.fusion.parts import AttentionHalf
from fp8core.fusion.sequences import Sequences

__all__ = ["BOUND", "TEAttention", "fp8_refusal"]

BOUND = 0.2
"""The largest difference allowed between attention in FP8 and in bf16, relative in 2-norm.

E4M3 has 4 bits of mantissa and E5M2 has 3, so that rounding to them is 2.6 and 5.2 % of a value on
average. The output passes three such roundings (q and k, probabilities, v), each gradient up to
five, some of them to E5M2. A wrong mask, scale or exchanged head differs by half of all or more.
"""

_ROWS, _LENGTH = 2, 256
_PASSES = 3  # scales of delayed scaling begin at 1, and are those of the inputs from the second on


class TEAttention:
    """`Attend` of one block; `in_fp8` says how whole rows are computed where FP8 is on at all.

    Several documents in a row are always computed in bf16: the FP8 kernels know no documents.
    """

    def __init__(self, half: AttentionHalf) -> None:
        self.in_fp8 = False
        self._half = half
        self.core = _core_class()(
            half.heads,
            half.head_dim,
            num_gqa_groups=half.kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal",
            softmax_scale=half.scale,
            name=half.core_name,
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        half = self._half
        if sequences.bounds is not None:
            packed = flash_attention(
                query, key, value, sequences, scale=half.scale, window=half.window
            )
            return packed.flatten(2)
        # A window as wide as the rows hides nothing, and kernels without one are faster.
        window = None
        if half.window is not None and half.window < sequences.length:
            window = (half.window - 1, 0)
        self.core.__dict__["_in_fp8"] = self.in_fp8
        output: Tensor = self.core(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            qkv_format="bshd",
            attn_mask_type="causal",
            window_size=window,
        )
        return output


def fp8_refusal(
    half: AttentionHalf, fp8: Callable[[], AbstractContextManager[Any]], device: torch.device
) -> str | None:
    """Why attention of ``half`` cannot be computed in FP8; None where it can, and agrees with bf16.

    ``fp8``: Transformer Engine's context of the recipe. Its global state must be empty before, and
    has a module in it afterwards that computes nothing any more.
    """
    attention = TEAttention(half)
    length = _LENGTH if half.window is None else 2 * half.window
    sequences = Sequences(_ROWS, length)
    generator = torch.Generator(device=device).manual_seed(0)

    def drawn(heads: int) -> Tensor:
        shape = (_ROWS, length, heads, half.head_dim)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return values.bfloat16().requires_grad_()

    query, key, value = drawn(half.heads), drawn(half.kv_heads), drawn(half.kv_heads)
    along = torch.randn_like(query).flatten(2)

    def computed() -> tuple[Tensor, ...]:
        with fp8():
            output = attention(query, key, value, sequences)
        return output.detach(), *torch.autograd.grad(output, (query, key, value), along)

    expected = computed()
    attention.in_fp8 = True
    try:
        found = [computed() for _ in range(_PASSES)][-1]
    except torch.OutOfMemoryError:
        raise
    # Transformer Engine and cuDNN refuse head sizes, windows and GPUs in their own ways.
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return f"Transformer Engine has no FP8 attention for it here: {text}"[:300]
    names = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
    for name, own, other in zip(names, found, expected, strict=True):
        apart = float((own.float() - other.float()).norm() / other.float().norm())
        if not apart <= BOUND:
            return f"{name} of FP8 attention differs by {apart:.2g} from bf16 (bound {BOUND:g})"
    return None


@functools.cache
def _core_class() -> Any:
    """``te.DotProductAttention`` that has FP8 state only where it computes in FP8.

    Transformer Engine's own takes part in the exchange of amaxes wherever FP8 is on; on several
    ranks those that have seen different batches would then exchange different numbers of them.
    """
    import transformer_engine.pytorch as te

    base: Any = te.DotProductAttention

    def init_fp8_metadata(self: Any, num_gemms: int = 1) -> None:
        if self.__dict__.get("_in_fp8", False):
            base.init_fp8_metadata(self, num_gemms)
        else:
            self.fast_setattr("fp8", False)

    members = {"init_fp8_metadata": init_fp8_metadata, "__module__": __name__}
    return type("OctrainDotProductAttention", (base,), members)
