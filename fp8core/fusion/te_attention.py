"""Attention of one fused block by Transformer Engine: in bf16, or in FP8 where the recipe asks.

With ``fp8_dpa`` Transformer Engine casts q, k and v, and backward the gradient of the output, to
FP8, and cuDNN's FP8 kernels multiply them. The scales of delayed scaling are those of six tensors:
q, k and v together, the output, the probabilities, and the gradients of the three.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fp8core.engines.te_attention_state import ATTENTION_COLUMNS
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

_QKV = ATTENTION_COLUMNS["forward"]["qkv"]
_ROWS, _LENGTH = 2, 256
_DISABLED = "Disabling FusedAttention"
_PASSES = 3  # scales of delayed scaling begin at 1, and are those of the inputs from the second on


class TEAttention:
    """`Attend` of one block; `in_fp8` says how whole rows are computed where FP8 is on at all.

    Several documents in a row are always computed in bf16: the FP8 kernels know no documents. So
    are whole rows whose weights are dropped out, by PyTorch's kernel and random numbers.
    """

    def __init__(self, half: AttentionHalf) -> None:
        self.in_fp8 = False
        self._half = half
        self._mask_type = "causal" if half.causal else "no_mask"
        self.core = _core_class()(
            half.heads,
            half.head_dim,
            num_gqa_groups=half.kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type=self._mask_type,
            softmax_scale=half.scale,
            name=half.core_name,
        )

    def quantizer(self, sequences: Sequences) -> Any | None:
        """What casts q, k and v where they may come in FP8 already; None where they may not."""
        from transformer_engine.pytorch.distributed import is_fp8_activation_recompute_enabled
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

        if (
            not self.in_fp8
            or sequences.bounds is not None
            or not FP8GlobalStateManager.is_fp8_enabled()
            # Where a block is recomputed, the module itself puts the scales of the first run back,
            # and only when it is called: it must cast, both times.
            or is_fp8_activation_recompute_enabled()
            or "scaling_fwd" not in self.core.quantizers
        ):
            return None
        found = self.core.quantizers["scaling_fwd"][_QKV]
        return found if type(found) is Float8Quantizer else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        half = self._half
        if sequences.bounds is not None or half.dropped:
            output = flash_attention(
                query,
                key,
                value,
                sequences,
                dropout=half.dropped,
                scale=half.scale,
                window=half.window,
                causal=half.causal,
            )
            return output.flatten(2)
        # A window as wide as the rows hides nothing, and kernels without one are faster.
        window = None
        if half.window is not None and half.window < sequences.length:
            window = (half.window - 1, 0)
        self.core.__dict__["_in_fp8"] = self.in_fp8
        attended: Tensor = self.core(
            *(_contiguous(part) for part in (query, key, value)),
            qkv_format="bshd",
            attn_mask_type=self._mask_type,
            window_size=window,
        )
        return attended


def _contiguous(part: Any) -> Any:
    """What is in FP8 already is so."""
    return part if hasattr(part, "_fp8_dtype") else part.contiguous()


def fp8_refusal(
    half: AttentionHalf,
    fp8: Callable[[], AbstractContextManager[Any]],
    after_backward: Callable[[], None],
    device: torch.device,
) -> str | None:
    """Why attention of ``half`` cannot be computed in FP8; None where it can, and agrees with bf16.

    ``fp8``: Transformer Engine's context of the recipe; ``after_backward`` makes new scales of the
    gradients' amaxes. Its global state must be empty before, and has a module in it afterwards that
    computes nothing any more.
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
        gradients = torch.autograd.grad(output, (query, key, value), along)
        after_backward()
        return output.detach(), *gradients

    expected = computed()
    attention.in_fp8 = True
    said = _Said()
    try:
        with said:
            found = [computed() for _ in range(_PASSES)][-1]
    except torch.OutOfMemoryError:
        raise
    # Transformer Engine and cuDNN refuse head sizes, windows and GPUs in their own ways.
    except Exception as error:
        text = said.reason or " ".join(f"{type(error).__name__}: {error}".split())
        return f"Transformer Engine has no FP8 attention for it here: {text}"[:300]
    names = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
    for name, own, other in zip(names, found, expected, strict=True):
        apart = float((own.float() - other.float()).norm() / other.float().norm())
        if not apart <= BOUND:
            return f"{name} of FP8 attention differs by {apart:.2g} from bf16 (bound {BOUND:g})"
    return None


class _Said(logging.Handler):
    """Hears why Transformer Engine takes no kernel of cuDNN's, which its error does not say."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.reason: str | None = None
        self._logger = logging.getLogger("DotProductAttention")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(_DISABLED):
            self.reason = text.removeprefix(_DISABLED).lstrip(" :")

    def __enter__(self) -> None:
        from transformer_engine.pytorch.attention.dot_product_attention import utils

        self._before = utils.AttentionLogging._log_level, self._logger.propagate
        utils.AttentionLogging._log_level, self._logger.propagate = logging.DEBUG, False
        self._logger.addHandler(self)

    def __exit__(self, *error: object) -> None:
        from transformer_engine.pytorch.attention.dot_product_attention import utils

        utils.AttentionLogging._log_level, self._logger.propagate = self._before
        self._logger.setLevel(self._before[0])
        self._logger.removeHandler(self)


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
