"""Which blocks of a model on the meta device would be fused.

Blocks are recognised as `fp8core.fusion.fuse` does, and the model is called as there; the proof on
numbers is that of a small twin. What an engine's own kernels would refuse shows on a GPU alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fp8core.conversion import Decision
from fp8core.conversion.decide import kept_apart
from fp8core.data.batch import round_up
from fp8core.fusion.block_inputs import AskedBlock
from fp8core.fusion.described import Rotation, described_blocks
from fp8core.fusion.fuse import MIXED
from fp8core.fusion.parts import Halves
from fp8core.fusion.reach import unreached
from fp8core.fusion.recognise import NO_BLOCKS, attention_elsewhere, find_blocks
from fp8core.fusion.rotary import RotaryAngles, rotary_angles
from fp8core.fusion.sight import row_length, sights
from fp8core.models.fusion_twin import refused_of_twin
from fp8core.spec import AmpRecipe, JobSpec
from fp8core.spec.recipe import token_multiple

__all__ = [
    "NOTHING_FUSED",
    "PlannedBlock",
    "PlannedFusion",
    "fusion_refusal",
    "planned_fusion",
]


@dataclass(frozen=True)
class PlannedBlock:
    """A block and those of its halves that would be fused."""

    name: str
    layer: nn.Module
    halves: Halves

    @property
    def asked(self) -> AskedBlock:
        return AskedBlock(
            self.name, self.layer, self.halves.layout, self.halves.attention is not None
        )


@dataclass(frozen=True)
class PlannedFusion:
    """``blocks``: those of which something would be fused; ``found``: how many the model has."""

    blocks: tuple[PlannedBlock, ...] = ()
    found: int = 0
    reasons: tuple[str, ...] = ()
    """Why a block, or half of it, would not be; the same reason may stand here often."""
    plain: bool = False
    """Whether they would be in high precision."""
    loss: bool = False
    elsewhere: bool = False
    """Whether the model attends outside of those that were found too."""

    @property
    def whole(self) -> bool:
        """Whether no attention of the model needs a mask."""
        attention = sum(block.halves.attention is not None for block in self.blocks)
        return attention == self.found > 0 and not self.elsewhere

    @property
    def in_both_halves(self) -> bool:
        """Whether all of every block would be fused."""
        return self._whole_blocks == self.found > 0

    @property
    def _whole_blocks(self) -> int:
        return sum(b.halves.attention is not None and b.halves.mlp is not None for b in self.blocks)

    @property
    def causal(self) -> bool:
        """Whether the attention of its blocks looks back alone."""
        return all(block.halves.causal for block in self.blocks)

    def to_json(self) -> dict[str, object]:
        """``blocks``, ``fused``, ``fused_in_part`` (counts), ``loss`` (whether it is fused too),
        and ``not_because``: reasons with their counts."""
        return {
            "blocks": self.found,
            "fused": self._whole_blocks,
            "fused_in_part": len(self.blocks) - self._whole_blocks,
            "loss": self.loss,
            "not_because": dict(Counter(self.reasons).most_common()),
        }


NOTHING_FUSED = PlannedFusion()


def planned_fusion(
    model: nn.Module,
    decisions: Sequence[Decision],
    spec: JobSpec,
    adapted: frozenset[str] = frozenset(),
    *,
    small: bool = False,
) -> PlannedFusion:
    """``decisions``: of the layers' conversion, not yet done; ``adapted``: the layers that get
    adapters; ``small``: whether the small-GEMM rule keeps the model in bf16."""
    candidates = list(find_blocks(model))
    refusal, loss = fusion_refusal(spec), _fuses_loss(spec)
    if refusal is not None or not candidates:
        return PlannedFusion((), len(candidates), (refusal or NO_BLOCKS,), loss=loss)
    plain = small or spec.recipe.engine == "amp"
    kept = kept_apart(decisions, plain=plain)
    config = getattr(model, "config", None)
    multiple = token_multiple(spec.recipe)
    length = row_length(config, round_up(spec.training.sequence_length, multiple))
    seen = sights(model, [layer for _, layer in candidates], length)
    described = list(
        described_blocks(
            candidates,
            config,
            kept=kept,
            adapted=adapted,
            seen=seen,
            rotation=lambda: _rotation(model, length),
        )
    )
    refused = refused_of_twin(model, candidates)
    blocks, reasons = [], []
    for found in described:
        name, halves = found.name, found.halves
        if name in refused:
            refused[name].take_from(halves)
        # The names of layers differ from block to block, their reasons need not.
        reasons += [reason.replace(f"{name}.", "") for reason in halves.reasons]
        if halves.attention is not None or halves.mlp is not None:
            blocks.append(PlannedBlock(name, found.layer, halves))
    elsewhere = attention_elsewhere(model, [layer for _, layer in candidates])
    planned = PlannedFusion(tuple(blocks), len(candidates), tuple(reasons), plain, loss, elsewhere)
    withdrawn = _withdrawn(model, planned)
    if withdrawn is None:
        return planned
    return replace(planned, blocks=(), reasons=(*reasons, *[withdrawn] * len(candidates)))


def _withdrawn(model: nn.Module, planned: PlannedFusion) -> str | None:
    """Why none of the blocks would be fused after all; `fuse` has the same reasons."""
    if not planned.blocks:
        return None
    if len({block.halves.causal for block in planned.blocks}) > 1:
        return MIXED
    asked = [block.asked for block in planned.blocks]
    return unreached(model, asked, masked=not planned.whole, causal=planned.causal)


def _fuses_loss(spec: JobSpec) -> bool:
    """On a GPU and in bf16 whatever becomes of the blocks."""
    in_bf16 = getattr(spec.recipe, "dtype", "bf16") == "bf16"
    return spec.conversion.fuse == "auto" and in_bf16 and spec.resources.device != "cpu"


def fusion_refusal(spec: JobSpec) -> str | None:
    """Why no block of any model would be fused under ``spec``, or None."""
    if spec.conversion.fuse == "none":
        return "conversion.fuse is none"
    if isinstance(spec.recipe, AmpRecipe):
        if spec.resources.device == "cpu":
            return "blocks are fused without FP8 on CUDA devices only"
        if spec.recipe.dtype != "bf16":
            return f"blocks are fused without FP8 in bf16 only, and this is {spec.recipe.dtype}"
        return None
    if spec.recipe.engine != "te":
        return f"the engine {spec.recipe.engine} has no fused blocks"
    if all(getattr(spec.recipe, "override_linear_precision", (False,))):
        return "override_linear_precision keeps all three GEMMs in high precision"
    return None


def _rotation(model: Any, length: int) -> Rotation:
    """`rotary_angles` of the model's embedding, built again with values."""
    held = nn.ModuleList()
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            try:
                held.append(type(module)(config=module.config))
            # Of foreign code: any class may want other arguments.
            except Exception as error:
                text = f"{type(module).__name__} cannot be built: {type(error).__name__}: {error}"
                return RotaryAngles(torch.empty(0)), text  # there are some, whatever they are
    return rotary_angles(held, length)
