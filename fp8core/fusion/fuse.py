"""Fusing the blocks of a model: recognised, proved on numbers, and put to work."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fp8core.data.batch import Batch
from fp8core.fusion import check
from fp8core.fusion.adapter_probe import probed
from fp8core.fusion.adapters import PlannedAdapters
from fp8core.fusion.blocks import FusedBlock
from fp8core.fusion.described import described_blocks
from fp8core.fusion.parts import BlockParts, FP8AttentionParts, Halves, core_name
from fp8core.fusion.reach import unreached
from fp8core.fusion.recognise import attention_elsewhere, find_blocks
from fp8core.fusion.rotary import RotaryAngles, rotary_angles
from fp8core.fusion.sequences import Sequences
from fp8core.fusion.sight import row_length, sights

__all__ = ["HELD", "MIXED", "BlockRow", "ModelFusion", "fuse"]

HELD = "_model_fusion"
"""Where a model keeps its fusion, in its ``__dict__``."""
MIXED = "some blocks of the model look ahead and some do not"
"""Why none of them is fused: a batch has one kind of sequences."""


@dataclass(frozen=True)
class BlockRow:
    """One block that was looked at: fused wholly or in part, or not, and why (not)."""

    name: str
    kind: str
    fused: tuple[str, ...]
    """Names of the halves that are fused."""
    reason: str | None

    @property
    def to(self) -> str | None:
        """The class it has now; None where nothing of it is fused."""
        return f"Fused{self.kind}" if self.fused else None


@dataclass
class ModelFusion:
    """The fused blocks of one model. ``whole``: no attention of the model needs a mask."""

    blocks: list[FusedBlock] = field(default_factory=list)
    rows: list[BlockRow] = field(default_factory=list)
    candidates: int = 0
    """How many blocks the model has."""
    elsewhere: bool = False
    """Whether it attends outside of them too."""
    fp8_attention: dict[str, str | None] = field(default_factory=dict)
    """Where attention was to compute in FP8: why it does not, by its `core_name`; None: it does."""

    @property
    def layers(self) -> dict[str, str]:
        """The names of all layers that are part of a fused half, each with its group."""
        found = {}
        for block in self.blocks:
            for half, layers in block.groups.items():
                found.update(dict.fromkeys(layers, half))
        return found

    @property
    def classes(self) -> dict[str, str]:
        """The class of the fused module that each of those layers is part of."""
        return {name: kind for block in self.blocks for name, kind in block.classes.items()}

    @property
    def attentions(self) -> list[nn.Module]:
        """The attention modules of the model that are fused."""
        return [block.attention.half.module for block in self.blocks if block.attention is not None]

    @property
    def causal(self) -> bool:
        """Whether the attention of its blocks looks back alone; it is so in all of them or none."""
        return all(block.causal for block in self.blocks)

    def sequences(self, batch: Batch) -> Sequences | None:
        """Those that its blocks are to be given; None where they cannot see ``batch`` fused."""
        return Sequences.of(batch, causal=self.causal)

    @property
    def whole(self) -> bool:
        return len(self.attentions) == self.candidates > 0 and not self.elsewhere

    def remove(self, layers: Collection[str]) -> dict[str, str]:
        """Un-fuses each half with one of ``layers``; all layers of those halves, with the half.

        A block without a fused half is forgotten.
        """
        removed = {}
        for block in self.blocks:
            for half, names in block.groups.items():
                if set(names) & set(layers):
                    removed.update(dict.fromkeys(names, half))
                    block.remove_half(half)
                    if core_name(half) in self.fp8_attention:
                        self.fp8_attention[core_name(half)] = "its attention is fused no more"
        self.blocks = [block for block in self.blocks if block.installed]
        return removed

    def remove_all(self) -> None:
        for block in self.blocks:
            block.remove()
        self.blocks.clear()


def fuse(
    model: nn.Module,
    parts: BlockParts,
    kept: Mapping[str, str],
    *,
    adapters: PlannedAdapters | None = None,
    length: int | None = None,
) -> ModelFusion:
    """Fuses what can be fused of ``model``, in place; says of every block what became of it.

    ``kept``: layers that must stay layers of their own, each with the reason; the half of a block
    that holds one is not fused. ``adapters``: those that ``peft`` will put around layers, which are
    computed beside them. ``length``: of the longest row that the model will be given; so far are
    rotary angles compared, and what its masks let tokens see (None: `row_length`).
    """
    fusion = ModelFusion()
    candidates = list(find_blocks(model))
    fusion.candidates = len(candidates)
    if not candidates:
        return fusion
    fusion.elsewhere = attention_elsewhere(model, [layer for _, layer in candidates])
    config: Any = getattr(model, "config", None)
    length = row_length(config, length)
    with parts.high_precision():
        seen = sights(model, [layer for _, layer in candidates], length)
    described = described_blocks(
        candidates,
        config,
        kept=kept,
        adapted=() if adapters is None else adapters.layers,
        seen=seen,
        rotation=lambda: rotary_angles(model, length),
    )
    for found in described:
        name, layer, halves = found.name, found.layer, found.halves
        kind = type(layer).__name__
        block = None
        if halves.attention is not None or halves.mlp is not None:
            block = _proved(name, layer, halves, parts, found.angles, adapters)
        if block is not None:
            block.install()
            fusion.blocks.append(block)
        fused = tuple(block.groups) if block is not None else ()
        reason = "; ".join(halves.reasons) or None
        fusion.rows.append(BlockRow(name, kind, fused, reason))
        if isinstance(parts, FP8AttentionParts) and parts.fp8_attention:
            path = f"{name}.{halves.layout.attention}"
            fusion.fp8_attention |= _fp8_attention(path, block, reason, parts)
    if fusion.blocks and config is not None:
        _withdraw_unreached(model, fusion, parts)
    model.__dict__[HELD] = fusion
    return fusion


def _fp8_attention(
    attention: str, block: FusedBlock | None, reason: str | None, parts: FP8AttentionParts
) -> dict[str, str | None]:
    """The entry of `ModelFusion.fp8_attention` for the attention module of this name."""
    if block is None or block.attention is None:
        return {core_name(attention): f"its attention is not fused: {reason}"}
    half = block.attention.half
    return {half.core_name: parts.fp8_attention_refusal(half)}


def _withdraw_unreached(model: nn.Module, fusion: ModelFusion, parts: BlockParts) -> None:
    """Takes all blocks out again where the model does not hand them the sequences of a batch."""
    blocks = [block.asked for block in fusion.blocks]
    reason: str | None = MIXED
    if len({block.causal for block in fusion.blocks}) == 1:
        with parts.high_precision():
            reason = unreached(model, blocks, masked=not fusion.whole, causal=fusion.causal)
    if reason is None:
        return
    parts.forget([name for block in fusion.blocks for name in block.made])
    fusion.remove_all()
    fusion.fp8_attention = dict.fromkeys(fusion.fp8_attention, reason)
    fusion.rows = [
        replace(row, fused=(), reason="; ".join(filter(None, (row.reason, reason))))
        for row in fusion.rows
    ]


def _proved(
    name: str,
    layer: nn.Module,
    halves: Halves,
    parts: BlockParts,
    angles: RotaryAngles | None,
    adapters: PlannedAdapters | None,
) -> FusedBlock | None:
    """The block with as many halves fused as agree with the plain ones."""
    attention, mlp = halves.attention, halves.mlp
    both = (attention, mlp)
    of_both = ""
    for choice in dict.fromkeys(
        pair for pair in (both, (attention, None), (None, mlp)) if any(pair)
    ):
        halves.attention, halves.mlp = choice
        narrow = check.narrowed(halves)
        tried = None if narrow is None else _tried(name, layer, narrow, parts, angles, adapters)
        if isinstance(tried, FusedBlock):
            # It was to show what the parts make of a window; its own is wider.
            parts.forget(tried.made)
        if not isinstance(tried, str):
            tried = _tried(name, layer, halves, parts, angles, adapters)
        if isinstance(tried, FusedBlock):
            if of_both and choice[1] is None:
                halves.reasons.append(of_both)  # attention alone agrees: it is the MLP
            return tried
        if all(both) and choice == both:
            of_both = tried
        else:
            halves.reasons.append(tried)
    halves.attention = halves.mlp = None
    return None


def _tried(
    name: str,
    layer: nn.Module,
    halves: Halves,
    parts: BlockParts,
    angles: RotaryAngles | None,
    adapters: PlannedAdapters | None,
) -> FusedBlock | str:
    """The block with ``halves`` fused, or why it must not be; its parts are forgotten then."""
    try:
        block = FusedBlock(name, layer, halves, parts, angles)
    except torch.OutOfMemoryError:
        raise
    # An engine may refuse what it is asked to build in its own ways.
    except Exception as error:
        parts.forget(halves.made)  # what it made before that
        return f"it cannot be built: {type(error).__name__}: {error}"
    with probed(block, adapters):
        reason = check.refusal(block, parts, angles)
    if reason is None:
        return block
    parts.forget(block.made)
    return reason
