"""What a model is called with, by how its attention learns who may look at whom."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fp8core.data.attention import BY_DOCUMENTS, model_inputs
from fp8core.data.batch import Batch
from fp8core.fusion.documents import SEQUENCES, documents_inputs, is_plainly_causal
from fp8core.fusion.fuse import HELD, ModelFusion
from fp8core.fusion.sequences import Sequences

__all__ = ["fused_inputs"]

_PLAINLY_CAUSAL: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def fused_inputs(model: nn.Module, batch: Batch, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of ``model`` for ``batch``: `model_inputs`, with masks where needed.

    No mask of [T, T] is made where all attention knows the sequences (it is fused, or goes by
    documents), nor where each row is one sequence that every layer looks back in anyway.
    """
    config: Any = model.config
    fusion = _fusion_of(model)
    fused = fusion is not None and bool(fusion.blocks)
    by_documents = getattr(config, "_attn_implementation", None) == BY_DOCUMENTS
    sequences = Sequences.of(batch) if batch.causal else None
    if fusion is not None and fused:
        sequences = fusion.sequences(batch)
    if sequences is None:
        return model_inputs(batch, config, compute_dtype)
    if (fusion is not None and fusion.whole) or (by_documents and batch.causal):
        return documents_inputs(batch, config, sequences)
    unmasked = batch.causal and batch.packed and sequences.bounds is None
    whole_rows = unmasked and _is_causal_by_itself(model)
    inputs = model_inputs(batch, config, compute_dtype, masked=not whole_rows)
    if fused:
        inputs[SEQUENCES] = sequences
    return inputs


def _fusion_of(model: Any) -> ModelFusion | None:
    if HELD not in model.__dict__ and hasattr(model, "get_base_model"):
        model = model.get_base_model()  # adapters are wrapped around it
    found: ModelFusion | None = model.__dict__.get(HELD)
    return found


def _is_causal_by_itself(model: nn.Module) -> bool:
    """Without any mask; PyTorch's flash kernels are chosen then, which masks rule out."""
    config: Any = model.config
    if getattr(config, "_attn_implementation", None) not in ("sdpa", BY_DOCUMENTS):
        return False
    if model not in _PLAINLY_CAUSAL:
        _PLAINLY_CAUSAL[model] = is_plainly_causal(model)
    return _PLAINLY_CAUSAL[model]
