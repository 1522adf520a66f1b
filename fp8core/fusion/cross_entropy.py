"""Cross-entropy that never holds logits in fp32, nor a gradient of their size beside them.

``F.cross_entropy`` of bf16 logits makes an fp32 copy, its softmax and its gradient: for 8192 tokens
and 128,000 classes 4 GB each. The fused kernel computes in fp32, a row at a time, and writes the
gradient over the logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8core.data.batch import IGNORED

__all__ = ["SumOfCrossEntropies", "fused_cross_entropy", "plain_cross_entropy"]

SumOfCrossEntropies = Callable[[Tensor, Tensor], Tensor]
"""(logits [..., classes], targets [...] int64, `IGNORED` for none): the sum in nats, fp32, 0-dim.

The logits must not be used once the backward pass has begun.
"""

_BOUND = 0.02  # of gradients rounded to bf16; a wrong target or scale is off by tens of per cent


def plain_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's own, on fp32 logits."""
    return F.cross_entropy(
        logits.float().view(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def fused_cross_entropy(device: torch.device) -> SumOfCrossEntropies | str:
    """In one kernel, compared with PyTorch's before use; or why it cannot be had here."""
    if device.type != "cuda":
        return "the fused cross-entropy runs on CUDA devices only"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, in which its kernel is written"
    try:
        difference = _difference(_in_one_kernel, device)
    # Its kernels are compiled here for the first time, by whatever compiler there is.
    except Exception as error:
        return f"it fails: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}"
    if not difference <= _BOUND:
        return f"it differs from PyTorch's by {difference:.2g} (bound {_BOUND:g})"
    return _in_one_kernel


def _in_one_kernel(logits: Tensor, targets: Tensor) -> Tensor:
    from fp8core.fusion.cross_entropy_kernel import sum_of_cross_entropies  # needs Triton

    return sum_of_cross_entropies(logits, targets, IGNORED)


def _difference(fused: SumOfCrossEntropies, device: torch.device) -> float:
    """Of losses and gradients, relative in 2-norm, on random logits with a target left out."""
    generator = torch.Generator(device=device).manual_seed(0)
    logits = torch.randn(2, 64, 1000, generator=generator, device=device) * 4
    targets = torch.randint(0, 1000, (2, 64), generator=generator, device=device)
    targets[0, :8] = IGNORED
    found = []
    for compute in (plain_cross_entropy, fused):
        given = logits.bfloat16().requires_grad_()
        # As from a layer: the kernel writes into its input, which no leaf would allow.
        loss = compute(given * 1.0, targets) / 100
        (gradient,) = torch.autograd.grad(loss, given)
        found.append((loss.detach(), gradient.float()))
    (own_loss, own), (loss, gradient) = found
    return max(
        float((own_loss - loss).abs() / own_loss),
        float((own - gradient).norm() / own.norm()),
    )
