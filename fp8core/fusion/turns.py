"""Cosines and sines of each token's rotation, made once a micro-batch and not once a block."""

from __future__ import annotations

from torch import Tensor

from fp8core.fusion.sequences import Sequences

__all__ = ["Turns"]


class Turns:
    """Remembers those of the last micro-batch, which all blocks see with one `Sequences`.

    Of another nothing is used again: a CUDA graph holds what was made while it was captured, and
    nothing keeps what was made before.
    """

    def __init__(self) -> None:
        self._gathered: tuple[Sequences, int, Tensor] | None = None
        self._known: tuple[Sequences, Tensor, Tensor, Tensor] | None = None

    def of_tokens(self, angles: Tensor, sequences: Sequences) -> Tensor:
        """``angles`` [B * T, d] at each token's place in its sequence."""
        of, table, gathered = self._gathered or (None, 0, angles)
        if of is not sequences or table != angles.data_ptr():
            gathered = angles[sequences.positions(angles.device).flatten()]
            self._gathered = sequences, angles.data_ptr(), gathered
        return gathered

    def of(self, angles: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """cos and sin [N, d / 2] of each token: of a row's, or of all where they lie packed."""
        found = angles if sequences.bounds is None else self.of_tokens(angles, sequences)
        known = self._known
        if (
            known is None
            or known[0] is not sequences
            or known[1].data_ptr() != found.data_ptr()
            or known[1].shape != found.shape
        ):
            half = found[:, : found.shape[1] // 2]
            # The angles are held too, so that no others can come to lie where they do.
            known = self._known = sequences, found, half.cos(), half.sin()
        return known[2], known[3]
