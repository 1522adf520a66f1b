"""Whether the sequences of a batch get through a model to its blocks.

They travel as a keyword argument that a model must hand on to each block. One that keeps it to
itself would leave its blocks with neither a mask nor sequences, and tokens would look ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8core.conversion.find import declared_output_head
from fp8core.data.attention import model_inputs
from fp8core.data.batch import IGNORED, Batch
from fp8core.fusion.block_inputs import AskedBlock, named_inputs
from fp8core.fusion.documents import SEQUENCES, documents_inputs
from fp8core.fusion.modes import in_evaluation
from fp8core.fusion.sequences import Sequences, document_bounds

__all__ = ["unreached"]

_LENGTH = 32
_CUT = 16  # where the second document begins


def unreached(
    model: Any, blocks: Sequence[AskedBlock], *, masked: bool, causal: bool
) -> str | None:
    """Why ``blocks`` of ``model`` cannot be given sequences; None where all of them get them.

    Nor can those that are called with tensors that they would not read. One row of two documents
    goes through the model in evaluation mode, as far as its output head, the cast of whose weight
    may be larger than a block. The model may lie on the meta device.
    ``masked``: whether the model is called with masks as well, for attention that is not fused.
    ``causal``: whether its attention looks back alone.
    """
    device = next(model.parameters()).device
    batch = _two_documents(causal).to(device)
    sequences = Sequences.of(batch, causal=causal)
    assert sequences is not None
    if masked:
        inputs = {**model_inputs(batch, model.config), "use_cache": False, SEQUENCES: sequences}
    else:
        inputs = documents_inputs(batch, model.config, sequences)
    reached: set[int] = set()
    wanted = len({id(block.layer) for block in blocks})
    unread: list[TypeError] = []
    missed = False

    def watch(block: AskedBlock) -> Any:
        def hook(layer: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
            nonlocal missed
            if options.get(SEQUENCES) is not sequences:
                missed = True
                return
            reached.add(id(layer))
            given = named_inputs(type(layer).forward, arguments[1:], options)
            given.pop(SEQUENCES, None)
            try:
                block.raise_if_unread(given)
            except TypeError as error:
                unread.append(error)
                raise

        return hook

    def leave_behind_the_blocks(*_: Any) -> None:
        if len(reached) == wanted:
            raise _Through

    exits = [
        block.layer.register_forward_pre_hook(watch(block), with_kwargs=True) for block in blocks
    ]
    head = declared_output_head(model)
    if head is not None:
        # In front of hooks of the user's own.
        exits.append(head.register_forward_pre_hook(leave_behind_the_blocks, prepend=True))
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # else it would hold a copy of all weights that it cast
    try:
        with in_evaluation(model), torch.no_grad():
            model(**inputs)
    except _Through:
        pass
    except torch.OutOfMemoryError:
        raise
    # A model may know no keyword of ours, in its own way.
    except Exception as error:
        if device.type == "meta" and not unread and not _runs(model, batch):
            return None  # for want of values, most likely: nothing can be said without them
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return f"the model cannot be called with the sequences of its batches: {text}"
    finally:
        torch.set_autocast_cache_enabled(caching)
        for leave in exits:
            leave.remove()
    if missed or len(reached) < wanted:
        return "the model does not hand the sequences of its batches on to its blocks"
    return None


class _Through(Exception):
    """Nothing is wanted of what follows."""


def _runs(model: Any, batch: Batch) -> bool:
    """Whether ``model`` can be called with ``batch`` as it is, without sequences."""
    try:
        with in_evaluation(model), torch.no_grad():
            model(**model_inputs(batch, model.config), use_cache=False)
    except Exception:
        return False
    return True


def _two_documents(causal: bool) -> Batch:
    documents = torch.zeros(1, _LENGTH, dtype=torch.int32)
    documents[0, _CUT:] = 1
    bounds = document_bounds(documents)
    ids = torch.arange(_LENGTH)[None, :] % 2  # every vocabulary has them
    positions = Sequences(1, _LENGTH, bounds).positions(ids.device)
    labels = torch.full_like(ids, IGNORED)
    return Batch(ids, labels, None, positions, documents, _LENGTH, 0, causal, bounds)
