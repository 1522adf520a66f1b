"""Models of every kind that te fuses, on a GPU, and a loss whose gradients two ways can compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8core.data.batch import Batch
from fp8core.engines.transformer_engine import TransformerEngine
from fp8core.fusion import fused_inputs
from fp8core.fusion.cross_entropy import plain_cross_entropy
from tests.fp8core.fusion import test_bert_gpu, test_gpt2_gpu, test_te_fusion_gpu

__all__ = ["EVERY_FAMILY", "FAR", "batch_for", "distances", "gradients_of", "make", "self_loss"]

EVERY_FAMILY = (*test_te_fusion_gpu.FAMILIES, "GPT2", "Bert")
FAR = 0.1
"""Rounding that differs before a cast to FP8 moves some elements by an FP8 step, as in
`test_gradient_parity_gpu`; a gradient of the wrong operand is tens of per cent away."""


def make(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    if family == "GPT2":
        return test_gpt2_gpu.make(dtype)
    if family == "Bert":
        # Of GELU's two forms the one that Transformer Engine's module for a whole MLP knows.
        return test_bert_gpu.make(dtype, activation="gelu_new")
    return test_te_fusion_gpu.make(family, dtype)


def batch_for(family: str, *, packed: bool) -> Batch:
    batch = test_te_fusion_gpu.batch_of(5, packed=packed)
    return replace(batch, causal=family != "Bert")


def self_loss(
    engine: TransformerEngine, model: Any, batch: Batch, first: bool | None = None
) -> Tensor:
    """Of each real token itself: any loss serves to compare gradients."""
    targets = batch.input_ids.masked_fill(batch.document_ids < 0, -100)
    inputs = fused_inputs(model, batch, torch.bfloat16)
    if batch.causal:
        inputs["use_cache"] = False
    with engine.training_context(first):
        logits = model(**inputs).logits
        return plain_cross_entropy(logits, targets) / (targets >= 0).sum()


def gradients_of(engine: Any, model: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients of all parameters that have one."""
    loss = self_loss(engine, model, batch)
    loss.backward()
    engine.after_backward()
    named = model.named_parameters()
    return loss.item(), {name: p.grad.float() for name, p in named if p.grad is not None}


def distances(
    gradients: dict[str, Tensor], others: dict[str, Tensor]
) -> tuple[float, dict[str, float]]:
    """Relative in 2-norm: of all together, and of each.

    But for a bias of BERT's k, which moves all scores of a token alike: what is left is rounding.
    """
    assert gradients.keys() == others.keys()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    apart = {n: (g - others[n]).norm() / others[n].norm() for n, g in gradients.items()}
    whole = torch.cat([gradient.flatten() for gradient in gradients.values()])
    along = torch.cat([gradient.flatten() for gradient in others.values()])
    total = float((whole - along).norm() / along.norm())
    return total, {n: float(far) for n, far in apart.items() if not n.endswith("key.bias")}
