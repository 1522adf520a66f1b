"""Attention masks that keep the documents of a packed row apart.

Hugging Face models can detect packed rows from restarting positions, but only causal ones, and not
while a key-value cache is on (the default of many configs); encoders take no notice of positions.
An explicit mask of shape [B, 1, T, T] is passed through by ``transformers`` as it is, for both
kinds, so that is what is built here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8core.data.batch import Batch

__all__ = ["BY_DOCUMENTS", "POSITIONS_AFTER_PADDING", "attention_mask_for", "model_inputs"]

BY_DOCUMENTS = "octrain_documents"
"""The attention implementation of `fp8core.fusion.documents`; what is masked goes as under sdpa."""

POSITIONS_AFTER_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Model types whose positions start behind the padding index; row ``padding_idx`` is a zero."""


def attention_mask_for(
    batch: Batch, dtype: torch.dtype, *, sliding_window: int | None = None
) -> Tensor:
    """What to pass to the model as ``attention_mask``.

    For an unpacked batch its [B, T] bool mask. For a packed one a mask of shape [B, 1, T, T]: a
    token attends to its own document, backwards only if the batch is causal, and to fewer than
    ``sliding_window`` tokens back where one is given. ``dtype`` torch.bool gives True for
    "attend" (scaled-dot-product attention only); a floating dtype gives 0 and the dtype's most
    negative number, to be added to the scores (eager attention too). Padding attends to padding,
    so that no row of the softmax is empty and no NaN arises.
    """
    if batch.attention_mask is not None:
        return batch.attention_mask
    documents = batch.document_ids
    allowed = documents[:, :, None] == documents[:, None, :]
    length = documents.shape[1]
    places = torch.arange(length, device=documents.device)
    distance = places[:, None] - places[None, :]
    if batch.causal:
        allowed &= distance >= 0
    if sliding_window is not None:
        allowed &= distance.abs() <= (sliding_window - 1 if batch.causal else sliding_window)
    allowed = allowed[:, None]
    if dtype == torch.bool:
        return allowed
    blocked = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return blocked.masked_fill_(~allowed, torch.finfo(dtype).min)


def model_inputs(
    batch: Batch, config: Any, dtype: torch.dtype = torch.float32, *, masked: bool = True
) -> dict[str, Any]:
    """Keyword arguments of a Hugging Face model for ``batch``, labels apart.

    ``config`` is the model's. The mask is bool for scaled-dot-product attention and of ``dtype``
    (that of the attention scores) for any other implementation. Models with sliding-window layers
    beside full ones get one mask for each kind, as their ``forward`` takes a mapping; those of the
    RoBERTa family get positions that start behind the padding index. Unpacked batches carry no
    positions, so that models without that argument work too. Not ``masked``: without a mask, for
    callers that know better.
    """
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    if not batch.packed:
        inputs["attention_mask"] = batch.attention_mask if masked else None
        return inputs
    inputs["attention_mask"] = _masks(batch, config, dtype) if masked else None
    positions = batch.position_ids
    if getattr(config, "model_type", "") in POSITIONS_AFTER_PADDING:
        offset = (getattr(config, "pad_token_id", None) or 0) + 1
        positions = positions + offset
    inputs["position_ids"] = positions
    return inputs


def _masks(batch: Batch, config: Any, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """The mask of a packed batch, or one for each kind of layer."""
    if getattr(config, "_attn_implementation", None) in ("sdpa", BY_DOCUMENTS):
        dtype = torch.bool
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    full = attention_mask_for(batch, dtype, sliding_window=None if kinds else window)
    if "sliding_attention" not in kinds or window is None:
        return full
    sliding = attention_mask_for(batch, dtype, sliding_window=window)
    return {"full_attention": full, "sliding_attention": sliding}
