"""In which formats attention multiplies: seen where its kernels are called.

That is in PyTorch's dispatcher (scaled-dot-product and flash attention), and at Transformer
Engine's entries to cuDNN. Attention as a model's own products and softmax has no such kernel, and
is not seen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core.engines.gemm_watch import format_of

__all__ = ["AttentionWatch"]

_ENTRIES = {"fused_attn_fwd": "forward", "fused_attn_bwd": "backward"}
_OPERATIONS = ("_scaled_dot_product_", "_flash_attention_", "_cudnn_attention_")
_Call = Callable[..., Any]


class AttentionWatch(TorchDispatchMode):
    """While entered, counts attention's calls in ``seen``: by (pass, format of q, k and v).

    A pass is ``forward`` or ``backward``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()
        self._replaced: dict[str, _Call] = {}

    def __enter__(self) -> AttentionWatch:
        kernels: Any = sys.modules.get("transformer_engine_torch")
        for entry, direction in _ENTRIES.items():
            own = getattr(kernels, entry, None)
            if own is not None:
                self._replaced[entry] = own
                setattr(kernels, entry, self._listening(own, direction))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        kernels: Any = sys.modules.get("transformer_engine_torch")
        for entry, own in self._replaced.items():
            setattr(kernels, entry, own)
        self._replaced.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(_OPERATIONS):
            direction = "backward" if name.endswith("_backward") else "forward"
            self.seen[direction, format_of(args[direction == "backward"])] += 1
        return func(*args, **(kwargs or {}))

    def _listening(self, own: _Call, direction: str) -> _Call:
        def listening(*args: Any, **kwargs: Any) -> Any:
            query = next((value for value in args if _is_of_heads(value)), None)
            if query is not None:
                self.seen[direction, format_of(query)] += 1
            return own(*args, **kwargs)

        return listening


def _is_of_heads(value: Any) -> bool:
    """Whether this is a tensor of heads: q is the first among the arguments of an entry."""
    if hasattr(value, "_fp8_dtype"):
        return True
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2
