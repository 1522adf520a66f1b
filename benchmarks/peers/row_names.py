"""Names of the rows of `train_peers`, and what is known of a row before it is built."""

from __future__ import annotations

__all__ = ["FLOOR", "IN_BF16", "ON_A_GPU_ONLY", "ROW_NAMES"]

FLOOR = "floor"

ROW_NAMES: dict[str, str] = {
    FLOOR: "floor",
    "fused": "Octrain te, fused",
    "fused_head": "Octrain te, fused, head in FP8",
    "fused_fp8_attention": "Octrain te, fused, head and attention in FP8",
    "fused_packed": "Octrain te, fused, 16 documents a row",
    "fused_current": "Octrain te, fused, current scaling",
    "fused_block": "Octrain te, fused, scaling by blocks",
    "fused_override": "Octrain te, fused, wgrad in bf16",
    "memory": "Octrain te, fused, head in FP8, 8-bit states",
    "memory_recompute": "Octrain te, 8-bit states, all blocks recomputed",
    "memory_some": "Octrain te, 8-bit states, 4 blocks recomputed",
    "memory_fp32": "Octrain te, 8-bit states, stored in fp32, 4 blocks recomputed",
    "memory_masters": "Octrain te, 8-bit states, fp32 masters, 18 blocks recomputed",
    "default": "Octrain te, as jobs are by default",
    "plain": "Octrain te, layer by layer",
    "plain_packed": "Octrain te, layer by layer, 16 documents a row",
    "plain_override": "Octrain te, layer by layer, wgrad in bf16",
    "octrain_bf16": "Octrain amp, bf16, fused",
    "octrain_bf16_packed": "Octrain amp, bf16, fused, 16 documents a row",
    "octrain_bf16_plain": "Octrain amp, bf16, layer by layer",
    "octrain_torchao": "Octrain torchao, tensorwise",
    "octrain_torchao_packed": "Octrain torchao, tensorwise, 16 documents a row",
    "bf16": "transformers bf16, SDPA",
    "compiled": "transformers bf16, torch.compile",
    "compiled_blocks": "transformers bf16, torch.compile of each block",
    "torchao": "torchao tensorwise, torch.compile",
    "torchao_blocks": "torchao tensorwise, torch.compile of each block",
    "accelerate": "Accelerate fp8, Transformer Engine",
}
"""By the name that is asked for, the one that tables print."""

IN_BF16 = frozenset(
    {
        "octrain_bf16",
        "octrain_bf16_packed",
        "octrain_bf16_plain",
        "bf16",
        "compiled",
        "compiled_blocks",
    }
)
"""Rows whose GEMMs are in bf16."""

ON_A_GPU_ONLY = frozenset({"fused_block", "fused_fp8_attention", "accelerate"})
"""Rows whose kernels no other engine stands in for on a CPU."""
