"""How much of a run's attention computes in FP8, where the recipe asks for it.

Micro-batches in which a row holds several documents attend in bf16: FP8 kernels know no documents.
Where attention looks ahead, padding is one more.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp8core.conversion import ConversionReport
from fp8core.data.batch import Batch
from fp8core.telemetry import TelemetryWriter

__all__ = ["SHARE", "AttentionFormat"]

SHARE = "train/fp8_attention_share"
"""Of this rank's micro-batches since the last logged step: the fraction that attended in FP8."""


class AttentionFormat:
    """Counts micro-batches, and says once where some attend in bf16."""

    def __init__(self, conversion: ConversionReport, telemetry: TelemetryWriter) -> None:
        self._fusion = conversion.fusion
        attention = {} if self._fusion is None else self._fusion.fp8_attention
        self._asked = None in attention.values()
        self._telemetry = telemetry
        self._said = False
        self._in_fp8 = self._in_all = 0
        self._last: dict[str, float] = {}

    def note(self, step: int, batches: Sequence[Batch]) -> None:
        """The micro-batches of ``step``, on the host; nothing is waited for."""
        if not self._asked or self._fusion is None:
            return
        found = [self._fusion.sequences(batch) for batch in batches]
        whole = [sequences is not None and sequences.bounds is None for sequences in found]
        self._in_all += len(whole)
        self._in_fp8 += sum(whole)
        if not all(whole) and not self._said:
            self._said = True
            self._telemetry.event(
                "attention_in_bf16",
                f"step {step}: rows with several documents attend in bf16, not in FP8; with "
                "data.packing off each document has a row of its own",
                {"step": step, "micro_batches": whole.count(False), "of": len(whole)},
            )

    def figures(self) -> dict[str, float]:
        """The share since this was last asked; empty where the recipe does not ask for FP8.

        On a GPU the last figures arrive when no further step has passed: the last share holds.
        """
        if self._in_all:
            self._last = {SHARE: self._in_fp8 / self._in_all}
            self._in_fp8 = self._in_all = 0
        return dict(self._last)
