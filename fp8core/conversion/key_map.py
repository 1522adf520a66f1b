"""State-dict keys of a converted model and of the original one, both ways.

Most replacements keep their keys. A fused layer does not: the weights of several original layers
lie in one tensor, one after the other along a dimension. A ``Join`` says so; a ``KeyMap`` applies
all joins of a model to a state dict in either direction. A join of one part is a renaming.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Join", "KeyMap", "Piece"]


@dataclass(frozen=True)
class Piece:
    """One original tensor inside a joined one: its key and its extent along the dimension."""

    key: str
    extent: int


@dataclass(frozen=True)
class Join:
    """``key`` of the converted model is the ``pieces``, in order, concatenated along ``dim``."""

    key: str
    pieces: tuple[Piece, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        if not self.pieces or any(piece.extent < 1 for piece in self.pieces):
            raise ValueError(f"the join {self.key!r} needs pieces of at least one row each")


class KeyMap:
    """The joins of one model; keys that no join names are the same on both sides."""

    def __init__(self, joins: Iterable[Join] = ()) -> None:
        self._joins = {join.key: join for join in joins}
        self._piece_of = {piece.key: join for join in self._joins.values() for piece in join.pieces}
        pieces = sum(len(join.pieces) for join in self._joins.values())
        if pieces != len(self._piece_of):
            raise ValueError("an original key is part of more than one join")

    @property
    def joins(self) -> tuple[Join, ...]:
        return tuple(self._joins.values())

    def original_names(self, key: str) -> tuple[str, ...]:
        """The original keys whose values lie in ``key`` of the converted model."""
        join = self._joins.get(key)
        return (key,) if join is None else tuple(piece.key for piece in join.pieces)

    def to_original(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``state`` of the converted model under the original keys; pieces are views, not copies.

        An engine's ``_extra_state`` is no part of a model and left out. Raises ValueError where a
        joined tensor has not the extent that its pieces add up to.
        """
        original: dict[str, Tensor] = {}
        for key, tensor in state.items():
            if key.rpartition(".")[2] == "_extra_state":
                continue
            join = self._joins.get(key)
            if join is None:
                original[key] = tensor
                continue
            wanted = sum(piece.extent for piece in join.pieces)
            if tensor.shape[join.dim] != wanted:
                raise ValueError(
                    f"{key} has {tensor.shape[join.dim]} rows along dimension {join.dim}, "
                    f"its pieces have {wanted}"
                )
            start = 0
            for piece in join.pieces:
                original[piece.key] = tensor.narrow(join.dim, start, piece.extent)
                start += piece.extent
        return original

    def to_converted(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``state`` under the original keys as the converted model's; joined tensors are new.

        Raises ValueError where a join has some of its pieces but not all, or of wrong extent.
        """
        converted: dict[str, Tensor] = {}
        for key, tensor in state.items():
            join = self._piece_of.get(key)
            if join is None:
                converted[key] = tensor
            elif join.key not in converted:
                converted[join.key] = _concatenated(join, state)
        return converted


def _concatenated(join: Join, state: Mapping[str, Tensor]) -> Tensor:
    missing = [piece.key for piece in join.pieces if piece.key not in state]
    if missing:
        raise ValueError(f"{join.key} cannot be made: {', '.join(missing)} missing")
    tensors = [state[piece.key] for piece in join.pieces]
    for piece, tensor in zip(join.pieces, tensors, strict=True):
        if tensor.shape[join.dim] != piece.extent:
            raise ValueError(
                f"{piece.key} has {tensor.shape[join.dim]} rows along dimension {join.dim}, "
                f"{piece.extent} expected"
            )
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=join.dim)
