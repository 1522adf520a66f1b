"""Which casts of weights may be used again, when several micro-batches see the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fp8core.numerics.float8_weight import Float8Weight

__all__ = ["WeightCasts"]


class WeightCasts:
    """Says for each forward pass of a layer whether its weight is to be cast anew.

    A cast is used again only for the very layer it was made for, since the last context that began
    with ``first_microbatch=True``, and only while the weight has not been written to in place: a
    layer that the first micro-batch skipped (an expert without tokens) never gets a cast from
    before the optimizer's step.
    """

    def __init__(self) -> None:
        self._reusing = False
        self._period = 0
        self._made: dict[str, tuple[int, int]] = {}

    def begin(self, first_microbatch: bool | None) -> None:
        """A micro-batch begins; holds for the recomputations of its backward pass too."""
        self._reusing = first_microbatch is not None
        if first_microbatch:
            self._period += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Casts made inside are used once, and those of before stay: for an evaluation."""
        before, self._reusing = self._reusing, False
        try:
            yield
        finally:
            self._reusing = before

    def is_first(self, name: str, *weights: Tensor) -> bool | None:
        """None: cast and do not keep it. True: cast and keep it. False: use the kept one.

        ``weights``: all that are cast for it. Those that lie in FP8 need no casts.
        """
        if not self._reusing or any(isinstance(weight, Float8Weight) for weight in weights):
            return None
        of_now = (self._period, _writes(weights))
        if self._made.get(name) == of_now:
            return False
        self._made[name] = of_now
        return True

    def reuses(self, name: str, *weights: Tensor) -> bool:
        """Whether the next forward pass of ``name`` will use a kept cast."""
        return self._reusing and self._made.get(name) == (self._period, _writes(weights))


def _writes(weights: tuple[Tensor, ...]) -> int:
    """How often any of them has been written to in place; never less than before."""
    return sum(weight._version for weight in weights)
