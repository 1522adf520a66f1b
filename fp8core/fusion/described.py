"""The blocks of a model as fusing and planning see them: what could be fused, and why not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8core.fusion.parts import Halves
from fp8core.fusion.recognise import describe_block
from fp8core.fusion.rotary import RotaryAngles
from fp8core.fusion.sight import Sight, misread

__all__ = ["DescribedBlock", "Rotation", "described_blocks"]

Rotation = tuple[RotaryAngles | None, str | None]
"""The rotary angles of a model, or None where none are known; and why attention that is rotated
must not be fused, or None where it may."""


@dataclass(frozen=True)
class DescribedBlock:
    """``angles``: the model's, where the block's attention is rotated by them."""

    name: str
    layer: nn.Module
    halves: Halves
    angles: RotaryAngles | None


def described_blocks(
    candidates: Sequence[tuple[str, nn.Module]],
    config: Any,
    *,
    kept: Mapping[str, str],
    adapted: Collection[str],
    seen: Mapping[int, Sight],
    rotation: Callable[[], Rotation],
) -> Iterator[DescribedBlock]:
    """Each of ``candidates``, named blocks of one model, as it is looked at.

    ``kept``: layers that must stay layers of their own, each with the reason; ``adapted``: those
    that get adapters; ``seen``: how far the model lets tokens see, by the id of each block.
    ``rotation`` is asked once, and only where attention is rotated.
    """
    found: Rotation | None = None
    for name, layer in candidates:
        halves = describe_block(name, layer, config)
        halves.adapted = frozenset(adapted)
        halves.keep_apart(kept)
        angles, wrong = None, None
        if halves.layout.rotated:
            found = found or rotation()
            angles, wrong = found
        if halves.attention is not None:
            halves.refuse_attention(wrong or misread(halves.attention, seen.get(id(layer))))
        if halves.layout.rotated and angles is None:
            # Without them a block cannot be run, and so not be compared.
            halves.mlp = None
        yield DescribedBlock(name, layer, halves, angles)
