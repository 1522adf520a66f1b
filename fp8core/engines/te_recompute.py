"""Gradient checkpointing of layers whose scales change between a forward pass and its repetition.

``te.checkpoint`` takes care of ``te.Linear``. For layers with state of our own, the first run of a
block keeps what it was cast with, and its recomputation casts with that again: the update at the
end of the micro-batch has replaced the scales by then. A recomputation stages no amax; its first
run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from fp8core.engines.te_state import ForwardScales

__all__ = ["FirstRun", "Recomputation"]


@dataclass(frozen=True)
class FirstRun:
    """How a region's forward pass ran: in FP8 or not, and with which scales.

    ``scales`` is None where casts find their own (current scaling).
    """

    fp8: bool
    scales: ForwardScales | None


class Recomputation:
    """Takes down each region's `FirstRun`, once and only if a block is checkpointed in it.

    ``take_down`` makes it; the scales must not change while a region is open.
    """

    def __init__(self, take_down: Callable[[], FirstRun]) -> None:
        self._take_down = take_down
        self._first_run: FirstRun | None = None
        self.repeated: FirstRun | None = None
        """What is being repeated now; None in a first run."""

    def region_changes(self) -> None:
        """A region begins or ends: what was taken down holds for the blocks before it only."""
        self._first_run = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For a checkpointed block: the contexts of its first run, which begins now, and its next.

        This is what ``torch.utils.checkpoint`` and ``te.checkpoint`` call ``context_fn``.
        """
        if self._first_run is None:
            self._first_run = self._take_down()
        return nullcontext(), self._repeat(self._first_run)

    @contextmanager
    def _repeat(self, first_run: FirstRun) -> Iterator[None]:
        before, self.repeated = self.repeated, first_run
        try:
            yield
        finally:
            self.repeated = before
