"""What a fused block is made of, and who makes it.

A block is described by what it computes (`AttentionHalf`, `MLPHalf`); an engine's `BlockParts`
makes the kernels that compute it over the very Parameters of the block's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fp8core.engines.protocol import NormDescription
from fp8core.fusion.sequences import Sequences

__all__ = [
    "AttentionHalf",
    "BlockParts",
    "FP8AttentionParts",
    "FusingEngine",
    "GatedActivation",
    "MLPHalf",
    "NamedLinear",
    "core_name",
    "own_head_norm",
    "split_heads",
]

GatedActivation = Literal["swiglu", "geglu"]
"""``act(gate) * up`` with SiLU, or with GELU in its tanh approximation."""


@dataclass(frozen=True)
class NamedLinear:
    """A Linear of the model and its name there."""

    name: str
    module: nn.Linear


@dataclass(frozen=True)
class AttentionHalf:
    """``x + o(attention(rotate(q), rotate(k), v))`` with q, k, v linear in ``norm(x)``.

    ``q_norm`` and ``k_norm``: whether the attention module normalises each head of q and k, by its
    children of these names. ``window``: how many tokens one sees, itself included; None: all.
    """

    name: str
    module: nn.Module
    norm: NormDescription
    norm_name: str
    q: NamedLinear
    k: NamedLinear
    v: NamedLinear
    o: NamedLinear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    head_norms: bool

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.norm_name, self.q.name, self.k.name, self.v.name, self.o.name)

    @property
    def core_name(self) -> str:
        """The name of what multiplies q, k and v."""
        return core_name(self.name)


@dataclass(frozen=True)
class MLPHalf:
    """``x + down(act(gate) * up)`` with gate and up linear in ``norm(x)``."""

    name: str
    norm: NormDescription
    norm_name: str
    gate: NamedLinear
    up: NamedLinear
    down: NamedLinear
    activation: GatedActivation

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.norm_name, self.gate.name, self.up.name, self.down.name)


def core_name(attention: str) -> str:
    """Of the attention module of this name, what multiplies q, k and v."""
    return f"{attention}.core_attention"


Kernel = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Sequences], Tensor]


class BlockParts(Protocol):
    """Makes the parts of fused blocks. Inputs and outputs are [B, T, features]."""

    kinds: ClassVar[Mapping[str, str]]
    """The class names of ``norm_linear``, ``linear`` and ``norm_mlp``, for the report."""

    def norm_linear(self, norm: NormDescription, linears: Sequence[nn.Linear], name: str) -> Kernel:
        """The Linears, side by side, of the normalised input."""
        ...

    def linear(self, linear: nn.Linear, name: str) -> Kernel: ...

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        """``down(act(gate) * up)`` of the normalised input."""
        ...

    def head_norm(self, half: AttentionHalf, name: str) -> Kernel:
        """The norm over each head that is the child ``name`` of the attention module."""
        ...

    def attention(self, half: AttentionHalf) -> Attend:
        """Of q [B, T, heads, d], k and v [B, T, kv_heads, d]: the outputs [B, T, heads * d]."""
        ...

    def split_rotated(
        self, joined: Tensor, half: AttentionHalf, angles: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q and k, rotated, and v of ``joined`` [B, T, all their features]."""
        ...

    def rotate(self, heads: Tensor, angles: Tensor, sequences: Sequences) -> Tensor:
        """Rotary embedding of [B, T, heads, d]; ``angles`` [>= T, d] fp32 by position."""
        ...

    def forget(self, names: Iterable[str]) -> None:
        """The parts made under these names are not used after all."""
        ...

    def high_precision(self) -> AbstractContextManager[object]:
        """Inside, the parts compute without FP8."""
        ...


@runtime_checkable
class FP8AttentionParts(Protocol):
    """`BlockParts` whose attention can compute in FP8 too."""

    @property
    def fp8_attention(self) -> bool:
        """Whether it is to."""
        ...

    def fp8_attention_refusal(self, half: AttentionHalf) -> str | None:
        """Of attention made before: why it does not compute in FP8, or None; it does from now on.

        Asked where ``fp8_attention`` is true.
        """
        ...


@runtime_checkable
class FusingEngine(Protocol):
    """An engine that can fuse blocks."""

    fuses_what_it_keeps: bool
    """Whether a layer that the engine refuses to convert may be part of a fused block.

    So it is where the parts compute in high precision as the layer does.
    """

    def fusion_refusal(self) -> str | None:
        """Why it fuses no block under its recipe, or None."""
        ...

    def block_parts(self) -> BlockParts: ...


def split_heads(joined: Tensor, half: AttentionHalf) -> tuple[Tensor, Tensor, Tensor]:
    """Views: q [B, T, heads, d], k and v [B, T, kv_heads, d] of ``joined`` [B, T, all of them]."""
    heads = joined.view(*joined.shape[:-1], half.heads + 2 * half.kv_heads, half.head_dim)
    query, key, value = torch.split(heads, [half.heads, half.kv_heads, half.kv_heads], dim=2)
    return query, key, value


def own_head_norm(half: AttentionHalf, name: str) -> Kernel:
    """The model's own module, looked up at each call: as a layer of its own it may be converted."""
    return lambda heads: half.module.get_submodule(name)(heads)


@dataclass
class Halves:
    """The halves of one block that are to be fused, and why not the others."""

    attention: AttentionHalf | None = None
    mlp: MLPHalf | None = None
    reasons: list[str] = field(default_factory=list)

    def keep_apart(self, kept: Mapping[str, str]) -> None:
        """Gives up each half that holds one of the layers ``kept``, which come with why."""
        for half in (self.attention, self.mlp):
            name = None if half is None else next((n for n in half.layers if n in kept), None)
            if name is None:
                continue
            self.reasons.append(f"{name} is kept: {kept[name]}")
            if half is self.attention:
                self.attention = None
            else:
                self.mlp = None
