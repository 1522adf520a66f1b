"""Fusion of blocks: norm with q, k, v; attention; norm with the whole MLP; the loss.

A fused block keeps its layers, its Parameters and their names; only the way from its input to its
output is another. So state dicts, checkpoints, optimizers and exports are those of the plain model.
"""

from fp8core.fusion.adapters import PlannedAdapters
from fp8core.fusion.blocks import FusedBlock
from fp8core.fusion.fuse import BlockRow, ModelFusion, fuse
from fp8core.fusion.inputs import fused_inputs
from fp8core.fusion.parts import BlockParts, FusingEngine

__all__ = [
    "BlockParts",
    "BlockRow",
    "FusedBlock",
    "FusingEngine",
    "ModelFusion",
    "PlannedAdapters",
    "fuse",
    "fused_inputs",
]
