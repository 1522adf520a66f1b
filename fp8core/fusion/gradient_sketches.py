"""What is kept of gradients that are only to be compared: a few rows of each large one.

The gradients of a block are as large as its weights, and to compare two ways to compute it would
take them twice. So each is taken out of the backward pass as it comes, multiplied by the same few
rows of random signs, and let go. Such rows keep the 2-norm of a matrix, and of the difference of
two, by the lemma of Johnson and Lindenstrauss (signs: Achlioptas, "Database-friendly random
projections", 2003): with 64 rows to within some 9 % where the matrix has rank one, and closer the
more its rows differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["sketch", "sketched_gradients"]

_ROWS = 64
_AT_ONCE = 2**20
"""Elements of a gradient that are multiplied together: a copy of so many is made."""
_WHOLE = 2**18
"""Elements of a gradient that is kept as it is."""


@contextmanager
def sketched_gradients(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Within it backward passes leave in the dict what is kept of the gradients of ``tensors``.

    ``tensors``: leaves by name. The gradients themselves are zeros without memory: whatever asks
    for them gets those. A tensor that no gradient reaches is not in the dict.
    """
    kept: dict[str, Tensor] = {}

    def hook(name: str) -> torch.utils.hooks.RemovableHandle:
        def take(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # of a function that says it has one and returns none
                return None
            kept[name] = sketch(gradient)
            return gradient.new_zeros(()).expand(gradient.shape)

        return tensors[name].register_hook(take)  # type: ignore[no-untyped-call, no-any-return]

    hooks = [hook(name) for name in tensors]
    try:
        yield kept
    finally:
        for handle in hooks:
            handle.remove()


def sketch(gradient: Tensor) -> Tensor:
    """A copy of what is small; of a large one ``[n, ...]`` 64 random sums of its rows, in fp32.

    The sums of two gradients of the same shape are of the same signs.
    """
    gradient = gradient.detach()
    if gradient.numel() <= _WHOLE or len(gradient) <= _ROWS:
        return gradient.clone()
    rows = gradient.flatten(1) if gradient.dim() > 1 else gradient[:, None]
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    generator = torch.Generator(device=gradient.device).manual_seed(0)
    sums = torch.zeros(_ROWS, rows.shape[1], dtype=dtype, device=gradient.device)
    with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
        for some in torch.split(rows, max(1, _AT_ONCE // rows.shape[1])):
            signs = torch.randint(
                2, (_ROWS, len(some)), generator=generator, device=gradient.device
            )
            sums.addmm_(signs.to(dtype).mul_(2).sub_(1), some.to(dtype))
        return sums.mul_(1 / math.sqrt(_ROWS))
