"""Whether the sequences of a batch get through a model to its blocks.

They travel as a keyword argument that a model must hand on to each block. One that keeps it to
itself would leave its blocks with neither a mask nor sequences, and tokens would look ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8core.data.attention import model_inputs
from fp8core.data.batch import IGNORED, Batch
from fp8core.fusion.documents import SEQUENCES, documents_inputs
from fp8core.fusion.sequences import Sequences, document_bounds

__all__ = ["unreached"]

_LENGTH = 32
_CUT = 16  # where the second document begins


def unreached(model: Any, layers: Sequence[nn.Module], *, masked: bool, causal: bool) -> str | None:
    """Why ``layers`` of ``model`` cannot be given sequences; None where all of them get them.

    One row of two documents goes through the model in evaluation mode. ``masked``: whether the
    model is called with masks as well, for attention that is not fused. ``causal``: whether its
    attention looks back alone.
    """
    batch = _two_documents(causal).to(next(model.parameters()).device)
    sequences = Sequences.of(batch, causal=causal)
    assert sequences is not None
    if masked:
        inputs = {**model_inputs(batch, model.config), "use_cache": False, SEQUENCES: sequences}
    else:
        inputs = documents_inputs(batch, model.config, sequences)
    reached: set[int] = set()

    def watch(layer: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        if options.get(SEQUENCES) is sequences:
            reached.add(id(layer))

    exits = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # else it would hold a copy of all weights that it cast
    try:
        with torch.no_grad():
            model(**inputs)
    except torch.OutOfMemoryError:
        raise
    # A model may know no keyword of ours, in its own way.
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return f"the model cannot be called with the sequences of its batches: {text}"
    finally:
        torch.set_autocast_cache_enabled(caching)
        for leave in exits:
            leave.remove()
        for module, training in modes.items():
            module.training = training
    if len(reached) < len({id(layer) for layer in layers}):
        return "the model does not hand the sequences of its batches on to its blocks"
    return None


def _two_documents(causal: bool) -> Batch:
    documents = torch.zeros(1, _LENGTH, dtype=torch.int32)
    documents[0, _CUT:] = 1
    bounds = document_bounds(documents)
    ids = torch.arange(_LENGTH)[None, :] % 2  # every vocabulary has them
    positions = Sequences(1, _LENGTH, bounds).positions(ids.device)
    labels = torch.full_like(ids, IGNORED)
    return Batch(ids, labels, None, positions, documents, _LENGTH, 0, causal, bounds)
