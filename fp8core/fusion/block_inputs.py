"""What a model gives to its blocks, and what of it a fused block cannot read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fp8core.fusion.layouts import BlockLayout

__all__ = ["ELSEWHERE", "AskedBlock", "named_inputs", "unread"]

ELSEWHERE = (
    "cache",
    "past_key_values",
    "past_key_value",
    "layer_past",
    "encoder_hidden_states",
    "encoder_attention_mask",
)
"""What only a block's own way serves: key-value caches, and attention to an encoder."""

# Tensors that sequences stand in for, or that change nothing in a block.
_KNOWN = (
    "attention_mask",
    "position_ids",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "num_items_in_batch",
)
_ANGLES = "position_embeddings"


@dataclass(frozen=True)
class AskedBlock:
    """A block, ``name`` in its model, of which ``attention`` or the MLP alone is fused."""

    name: str
    layer: nn.Module
    layout: BlockLayout
    attention: bool

    def raise_if_unread(self, options: Mapping[str, Any]) -> None:
        """Raises TypeError where ``options`` hold what its fused form would not read."""
        found = unread(self.layout, options) if self.attention else []
        if found:
            raise TypeError(
                f"{self.name} is called with {', '.join(found)}, which its fused form would not "
                "read: fuse no blocks (conversion.fuse: none)"
            )


def named_inputs(
    forward: Callable[..., Any], positional: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """All that ``forward`` of a block's class is given, by name, but for the hidden states.

    ``positional``: what comes behind those.
    """
    return {**options, **dict(zip(_names(forward), positional, strict=False))}


@functools.cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[2:]  # without `self` and hidden states


def unread(layout: BlockLayout, options: Mapping[str, Any]) -> list[str]:
    """Names of tensors that a block's own attention would read and a fused one does not.

    A bias of the scores, for instance, which the proof of a block does not know of.
    """
    known = (*_KNOWN, *ELSEWHERE, *((_ANGLES,) if layout.rotated else ()))
    return [name for name, value in options.items() if name not in known and _has_tensor(value)]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(_has_tensor(one) for one in value)
    return isinstance(value, Tensor)
