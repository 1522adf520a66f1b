"""A few tokens through a model before anything is made of it.

Configurations pass their own checks and still fail in the first forward pass, and some
architectures take no notice of the mask that keeps packed documents apart: recurrent ones carry
their state over, convolutions and Fourier transforms mix neighbours. No list of such models would
stay true, so each model is asked: what one document gives must not depend on the other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8core.data.batch import IGNORED, PADDING_DOCUMENT, TOKEN_MULTIPLE, Batch
from fp8core.errors import ModelUnavailable, SpecRefused, TrainingError
from fp8core.models import LoadedModel
from fp8core.spec.job import JobSpec
from fp8core.training.forward import logits_in

__all__ = ["try_out"]

_LONGEST = 4
# Relative to the logits' own size. A masked score adds nothing at all; what is left is another
# order of summation where a mixture of experts sorts its tokens.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3}


def try_out(loaded: LoadedModel, spec: JobSpec, compute_dtype: torch.dtype) -> None:
    """Refuses a model that cannot run on a batch of ``spec``, or would mix packed documents.

    Two small forward passes: one as in evaluation, in the dtype of the weights, one as in training,
    under autocast to ``compute_dtype``. Leaves the model and all random states as they were.

    Raises ``SpecRefused``, or ``ModelUnavailable`` where a checkpoint is at fault.
    """
    model = loaded.model
    device = next(model.parameters()).device
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        try:
            _check(loaded, spec, compute_dtype, device)
        finally:
            model.eval()
            for buffer, before in buffers:
                buffer.copy_(before)


def _check(
    loaded: LoadedModel, spec: JobSpec, compute_dtype: torch.dtype, device: torch.device
) -> None:
    kind = f"a {loaded.config.model_type} model"
    packed = spec.data.packing
    batch = _batch(loaded, spec, packed=packed).to(device)
    error, logits = _run(loaded.model, batch, compute_dtype)
    if error is None:
        assert logits is not None
        counted = logits[batch.document_ids >= 0] if logits.dim() == 3 else logits
        if not bool(counted.isfinite().all()):
            raise _fault(loaded, f"{kind} with these weights gives numbers that are not finite")
        if packed and not _kept_apart(logits, batch):
            raise SpecRefused(
                f"{kind} does not keep packed documents apart, whatever mask it is given; "
                "set packing to false",
                pointer="/data/packing",
            )
        return
    reason = " ".join(str(error).split()) or type(error).__name__
    if packed:
        alone = _batch(loaded, spec, packed=False).to(device)
        if _run(loaded.model, alone, compute_dtype)[0] is None:
            raise SpecRefused(
                f"{kind} takes no packed documents ({reason}); set packing to false",
                pointer="/data/packing",
            ) from error
    raise _fault(loaded, f"{kind} so configured fails in its forward pass: {reason}") from error


def _fault(loaded: LoadedModel, message: str) -> TrainingError:
    if loaded.folder is None:
        return SpecRefused(message, pointer="/model/config")
    return ModelUnavailable(message, pointer="/model")


def _run(
    model: nn.Module, batch: Batch, compute_dtype: torch.dtype
) -> tuple[Exception | None, Tensor | None]:
    """The error that the model raised, or the logits in the dtype of its weights."""
    weights = next(model.parameters()).dtype
    cast = compute_dtype in (torch.bfloat16, torch.float16)
    try:
        model.eval()
        logits = logits_in(model, batch, weights)
        model.train()
        with torch.autocast(batch.input_ids.device.type, compute_dtype, enabled=cast):
            logits_in(model, batch, compute_dtype)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    # A model's code may fail in any way on what its configuration asks for.
    except Exception as error:
        return error, None
    return None, logits


def _batch(loaded: LoadedModel, spec: JobSpec, *, packed: bool) -> Batch:
    """Three rows of 16 tokens.

    Packed: two documents each, of which the second row differs from the first in the first
    document and the third row in the second. Not packed: one text with an end token.
    """
    config = loaded.config
    size = max(1, min(_LONGEST, spec.training.sequence_length // 2))
    pad, end = config.pad_token_id or 0, config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    vocabulary = config.get_text_config().vocab_size
    plain = [token for token in range(min(64, vocabulary)) if token not in (pad, end)]
    one, two, three = (plain * 3)[:3] if plain else (0, 0, 0)
    ids = torch.full((3, TOKEN_MULTIPLE), pad, dtype=torch.int64)
    documents = torch.full((3, TOKEN_MULTIPLE), PADDING_DOCUMENT, dtype=torch.int32)
    positions = torch.zeros((3, TOKEN_MULTIPLE), dtype=torch.int64)
    if packed:
        for row, (first, second) in enumerate([(one, two), (three, two), (one, three)]):
            ids[row, :size] = first
            ids[row, size : 2 * size] = second
        documents[:, :size] = 0
        documents[:, size : 2 * size] = 1
        positions[:, : 2 * size] = torch.arange(size).repeat(2)
    else:
        ids[:, : 2 * size] = one
        if end is not None:
            ids[:, 2 * size - 1] = end
        documents[:, : 2 * size] = 0
        positions[:, : 2 * size] = torch.arange(2 * size)
    return Batch(
        input_ids=ids,
        labels=torch.full_like(ids, IGNORED),
        attention_mask=None if packed else documents >= 0,
        position_ids=positions,
        document_ids=documents,
        token_count=int((documents >= 0).sum()),
        target_count=0,
        causal=spec.task == "causal_lm",
    )


def _kept_apart(logits: Tensor, batch: Batch) -> bool:
    first, second = (batch.document_ids[0] == number for number in (0, 1))
    limit = _TOLERANCE.get(logits.dtype, 1e-3) * float(logits.float().norm(dim=-1).max())
    for row, same in ((1, second), (2, first)):
        difference = (logits[0, same].float() - logits[row, same].float()).norm(dim=-1)
        if float(difference.max()) > limit:
            return False
    return True
