"""Floating-point operations of one training step.

The count is that of Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022),
appendix B: a token costs 6 N for the GEMMs, forward and backward, and 12 L H Q T for attention
(L layers, H heads of size Q, T tokens), the causal half not taken off. N here is the weights that
take part in GEMMs: linear layers and the output head, a tied one too, but not the look-up of an
embedding. Of a mixture's experts only those that a token is sent to count,
and the small layer that sends it does not. Recomputation by
gradient checkpointing is not counted: it is no work of the model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8core.conversion.find import is_conv1d, sequence_level_layers, stacked_experts

__all__ = ["FORMULA", "StepFlops", "step_flops"]

FORMULA = "6 * N * tokens + 12 * layers * heads * head_dim * sequence_length * tokens"

# One GEMM each: fprop, dgrad, wgrad.
_GEMMS = 3


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one optimizer step over all micro-batches and GPUs.

    ``fp8_share``: the part of ``gemm`` that the recipe runs in FP8.
    """

    total: int
    gemm: int
    attention: int
    fp8_share: float
    formula: str = FORMULA


def step_flops(
    model: nn.Module,
    converted: Collection[nn.Module],
    config: Any,
    *,
    micro_batches: int,
    batch_size: int,
    sequence_length: int,
    override: tuple[bool, bool, bool],
) -> StepFlops:
    """FLOPs of ``micro_batches`` passes of [batch_size, sequence_length] tokens.

    ``converted`` are the Linears that run in FP8, save for the GEMMs that ``override`` (fprop,
    dgrad, wgrad) keeps in high precision.
    """
    tokens = batch_size * sequence_length * micro_batches
    sequences = batch_size * micro_batches
    of_sequences = sequence_level_layers(model)
    in_fp8 = {id(module) for module in converted}
    gemm = fp8 = 0
    for module in model.modules():
        rows = sequences if id(module) in of_sequences else tokens
        flops = 2 * _GEMMS * _gemm_weights(module, config) * rows
        gemm += flops
        if id(module) in in_fp8:
            fp8 += flops * override.count(False) // _GEMMS
    text = config.get_text_config()
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    attention = 12 * layers * heads * head_dim * sequence_length * tokens
    return StepFlops(gemm + attention, gemm, attention, fp8 / gemm if gemm else 0.0)


def _gemm_weights(module: nn.Module, config: Any) -> int:
    """Weights that one row of the module's input is multiplied with."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return int(module.weight.numel())  # type: ignore[operator]  # a Tensor
    if isinstance(module, nn.MultiheadAttention):
        return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)
    experts = [module.get_parameter(key) for key in stacked_experts(module)]
    if experts:
        text = config.get_text_config()
        chosen = int(getattr(text, "num_experts_per_tok", 1))
        return sum(p.numel() // p.shape[0] for p in experts) * chosen
    return 0
