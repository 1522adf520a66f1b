"""Attention of transformers' own layers over documents' bounds in the place of masks of [T, T].

A mask rules out the flash kernels: attention is computed for pairs of tokens of unlike documents
too, and takes several times as long. Here `Sequences` go through the model to an attention function
of its own (registered with transformers), which gives them to a kernel that takes bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8core.data.attention import BY_DOCUMENTS, model_inputs
from fp8core.data.batch import IGNORED, Batch
from fp8core.fusion.flash import flash_attention, takes
from fp8core.fusion.modes import in_evaluation
from fp8core.fusion.sequences import Sequences, document_bounds

__all__ = [
    "SEQUENCES",
    "attend_by_documents",
    "documents_inputs",
    "is_plainly_causal",
    "switch_to_documents",
]

SEQUENCES = "fused_sequences"
"""The keyword under which a `Sequences` goes through a model to its blocks and attention."""

_WATCHED = f"{BY_DOCUMENTS}_watched"
_BOUND = 0.05  # of bf16, as in `check`; documents that see one another are off by far more
_ROWS, _LENGTH = 2, 64
_CUTS = ((0, 23), (1, 40))  # (row, place): where the second document of each row begins

Attention = Callable[..., tuple[Tensor, None]]


def is_plainly_causal(model: nn.Module) -> bool:
    """Whether all attention of ``model`` says of itself that it looks back alone.

    Only then may a mask be left out: an encoder would look ahead.
    """
    said = [attention.is_causal for attention in _attentions(model)]
    return bool(said) and all(value is True for value in said)


def attend_by_documents(
    model: Any,
    evaluating: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    fused: Collection[nn.Module] = (),
) -> str | None:
    """Switches ``model`` to attention over documents' bounds, or says why it keeps its masks.

    Compared with the masked form before use: every attention of the model must go this way, and
    its logits must agree. ``evaluating``: the engine's context for evaluation. ``fused``: attention
    modules of the model that fused blocks compute in the place of.
    """
    if device.type != "cuda":
        return "the kernels that take documents' bounds run on CUDA devices only"
    return switch_to_documents(model, evaluating, device, fused)


def switch_to_documents(
    model: Any,
    evaluating: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    fused: Collection[nn.Module] = (),
) -> str | None:
    """`attend_by_documents` on any device; where there are no kernels, by masks of its own."""
    config = model.config
    own = getattr(config, "_attn_implementation", None)
    if own != "sdpa":
        return f"the model's attention is {own}, not sdpa"
    if not is_plainly_causal(model):
        return "not all of the model's attention is causal"
    try:
        with in_evaluation(model), torch.no_grad(), evaluating():
            reason = _difference(model, device, fused)
    except torch.OutOfMemoryError:
        config._attn_implementation = own
        raise
    # A model may know no keyword of ours, and a kernel not its heads, each in its own way.
    except Exception as error:
        reason = " ".join(f"it fails: {type(error).__name__}: {error}".split())[:300]
    config._attn_implementation = own if reason else BY_DOCUMENTS
    return reason


def documents_inputs(batch: Batch, config: Any, sequences: Sequences) -> dict[str, Any]:
    """Keyword arguments of a model whose attention goes by ``sequences``: no mask of [T, T]."""
    # transformers passes a mask of four dimensions on as it is, and makes none of its own.
    unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
    inputs = model_inputs(batch, config, masked=False)
    # A key-value cache serves generation only, and would lead past fused blocks.
    return {**inputs, "attention_mask": unread, "use_cache": False, SEQUENCES: sequences}


def _attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_causal")]


def _difference(model: Any, device: torch.device, fused: Collection[nn.Module]) -> str | None:
    """Sends two rows of two documents each through the model, both ways."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    asked = {id(module) for module in fused}

    def attention(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
        return _by_documents(sdpa_attention_forward, module, *tensors, **options)

    def watched(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
        if options.get(SEQUENCES) is not None:
            asked.add(id(module))
        return attention(module, *tensors, **options)

    for name, function in ((BY_DOCUMENTS, attention), (_WATCHED, watched)):
        AttentionInterface.register(name, function)
        # Whatever comes without sequences (another batch, generation) goes as under sdpa.
        AttentionMaskInterface.register(name, sdpa_mask)
    batch = _two_documents_a_row(model.config).to(device)
    sequences = Sequences.of(batch)
    assert sequences is not None
    expected = model(**model_inputs(batch, model.config), use_cache=False).logits.float()
    model.config._attn_implementation = _WATCHED
    found = model(**documents_inputs(batch, model.config, sequences)).logits.float()
    passed = [module for module in _attentions(model) if id(module) not in asked]
    if passed:
        return f"{len(passed)} attention layers of the model do not ask its config how to attend"
    apart = float((found - expected).norm() / expected.norm())
    return None if apart <= _BOUND else f"its logits differ by {apart:.2g} (bound {_BOUND:g})"


def _two_documents_a_row(config: Any) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (_ROWS, _LENGTH), generator=generator)
    documents = torch.zeros(_ROWS, _LENGTH, dtype=torch.int32)
    for row, place in _CUTS:
        documents[row, place:] = 1
    bounds = document_bounds(documents)
    positions = Sequences(_ROWS, _LENGTH, bounds).positions(ids.device)
    labels = torch.full_like(ids, IGNORED)
    return Batch(ids, labels, None, positions, documents, ids.numel(), 0, True, bounds)


def _by_documents(
    otherwise: Attention,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: of [B, heads, T, d] the outputs [B, T, heads, d].

    ``otherwise``: transformers' own by scaled-dot-product attention, for whatever comes without
    sequences, and with a mask of them where the kernels do not take the tensors.
    """
    sequences: Sequences | None = options.pop(SEQUENCES, None)
    more = {"dropout": dropout, "scaling": scaling, **options}
    if sequences is None:
        return otherwise(module, query, key, value, attention_mask, **more)
    if options.get("softcap") is not None or options.get("position_bias") is not None:
        raise ValueError("attention by documents knows neither soft caps nor position biases")
    window = sliding_window
    if window is not None and window >= sequences.length:
        window = None  # it hides nothing, and kernels without one are faster
    query, key, value = _as_under_autocast(query, key, value)
    if not takes(query, key, value):
        mask = None
        if sequences.bounds is not None or window is not None:
            mask = sequences.mask(query.device, window)
        return otherwise(module, query, key, value, mask, **more)
    if sequences.bounds is None and window is None:
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).contiguous(), None
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    output = flash_attention(
        query, key, value, sequences, dropout=dropout, scale=scaling, window=window
    )
    return output, None


def _as_under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In one dtype: autocast's, as scaled-dot-product attention has them, or the narrowest."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = min((tensor.dtype for tensor in tensors), key=lambda kind: kind.itemsize)
    return tuple(tensor.to(dtype) for tensor in tensors)
