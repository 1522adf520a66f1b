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

from fp8core.conversion.find import is_conv1d
from fp8core.engines.protocol import NormDescription
from fp8core.fusion.joined import join
from fp8core.fusion.layouts import BlockLayout
from fp8core.fusion.sequences import Sequences

__all__ = [
    "Activation",
    "AttentionHalf",
    "BlockParts",
    "FP8AttentionParts",
    "FusingEngine",
    "GatedActivation",
    "Halves",
    "Kernel",
    "MLPHalf",
    "NamedLinear",
    "NormedKernel",
    "core_name",
    "joined",
    "own_head_norm",
    "split_heads",
]

GatedActivation = Literal["swiglu", "geglu"]
"""``act(gate) * up`` with SiLU, or with GELU in its tanh approximation."""
Activation = Literal["swiglu", "geglu", "gelu", "gelu_erf"]
"""The last two: ``act(up)``, with no gate, of GELU in its tanh approximation and of GELU itself."""


@dataclass(frozen=True)
class NamedLinear:
    """A Linear of the model, or transformers' ``Conv1D``, and its name there."""

    name: str
    module: nn.Module

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as the model keeps it."""
        found = self.module.weight
        assert isinstance(found, nn.Parameter)
        return found

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: the Parameter itself, or a view that turns it over."""
        return self.parameter.t() if is_conv1d(self.module) else self.parameter

    @property
    def bias(self) -> nn.Parameter | None:
        found = self.module._parameters["bias"]
        assert found is None or isinstance(found, nn.Parameter)
        return found

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])


@dataclass(frozen=True)
class AttentionHalf:
    """``o(attention(rotate(q), rotate(k), v))`` with q, k, v linear in ``norm(x)``, or in x.

    ``inputs``: the Linears of q, k and v, or the one of all three together. ``rotated``: whether q
    and k are. ``head_norms``: whether the attention module normalises each head of q and k, by its
    children ``q_norm`` and ``k_norm``. ``window``: how many tokens one sees, itself included; None:
    all. ``causal``: whether a token sees none behind it. ``dropout``: of attention's weights.
    """

    name: str
    module: nn.Module
    norm: NormDescription | None
    norm_name: str | None
    inputs: tuple[NamedLinear, ...]
    o: NamedLinear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    head_norms: bool
    rotated: bool
    causal: bool = True
    dropout: nn.Dropout | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        norm = () if self.norm_name is None else (self.norm_name,)
        return (*norm, *(linear.name for linear in self.inputs), self.o.name)

    @property
    def head_norm_names(self) -> tuple[str, ...]:
        return (f"{self.name}.q_norm", f"{self.name}.k_norm") if self.head_norms else ()

    @property
    def dropped(self) -> float:
        """The share of attention's weights that is dropped out now."""
        return self.dropout.p if self.dropout is not None and self.module.training else 0.0

    @property
    def group(self) -> str:
        """The name of the GEMM that computes q, k and v."""
        return self.inputs[0].name if len(self.inputs) == 1 else f"{self.name}.qkv_proj"

    @property
    def core_name(self) -> str:
        """The name of what multiplies q, k and v."""
        return core_name(self.name)

    @property
    def made(self) -> tuple[str, ...]:
        """The names under which an engine makes parts of it."""
        return self.group, self.o.name, self.core_name


@dataclass(frozen=True)
class MLPHalf:
    """``down(act(gate) * up)`` with gate and up linear in ``norm(x)``; or without a gate.

    ``inputs``: the Linears of gate and up, or of up alone. ``prefix``: what the names of both
    layers begin with, where there is no gate and it is not the half's own name. ``returns_norm``:
    whether ``norm(x)`` is wanted beside it, for the residual.
    """

    name: str
    norm: NormDescription
    norm_name: str
    inputs: tuple[NamedLinear, ...]
    down: NamedLinear
    activation: Activation
    prefix: str | None = None
    returns_norm: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.norm_name, *(linear.name for linear in self.inputs), self.down.name)

    @property
    def gemms(self) -> tuple[str, str]:
        """The names of the two, behind that of the module."""
        if len(self.inputs) == 2:
            return ".gate_up_proj", ".down_proj"
        up, down = (linear.name.removeprefix(self.group) for linear in (*self.inputs, self.down))
        return up, down

    @property
    def group(self) -> str:
        """The name of the module that computes both GEMMs."""
        return self.name if self.prefix is None else self.prefix

    @property
    def made(self) -> tuple[str, ...]:
        """The names under which an engine makes parts of it, as one or in steps."""
        return self.group, self.group + self.gemms[0], self.down.name


def core_name(attention: str) -> str:
    """Of the attention module of this name, what multiplies q, k and v."""
    return f"{attention}.core_attention"


Kernel = Callable[[Tensor], Tensor]
NormedKernel = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Gives the normalised input beside its output."""
Attend = Callable[[Tensor, Tensor, Tensor, Sequences], Tensor]


class BlockParts(Protocol):
    """Makes the parts of fused blocks. Inputs and outputs are [B, T, features]."""

    kinds: ClassVar[Mapping[str, str]]
    """The class names of ``norm_linear``, ``linear`` and ``norm_mlp``, for the report."""
    mlp_in_one: ClassVar[bool]
    """Whether both GEMMs of an MLP may be one part; else ``norm_mlp`` is not asked for."""

    def norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> Kernel:
        """The Linears, side by side, of the normalised input."""
        ...

    def norm_linear_and_norm(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> NormedKernel:
        """The same, and the normalised input."""
        ...

    def linears(self, linears: Sequence[NamedLinear], name: str) -> Kernel:
        """The Linears, side by side, of the input as it is."""
        ...

    def linear(self, linear: NamedLinear) -> Kernel: ...

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        """``down(act(gate) * up)`` of the normalised input, or ``down(act(up))``.

        Of GELU by the error function it is not asked.
        """
        ...

    def norm_mlp_and_norm(self, half: MLPHalf) -> NormedKernel:
        """The same, and the normalised input."""
        ...

    def active(self, inner: Tensor, activation: Activation) -> Tensor:
        """``act(gate) * up`` of the two, side by side, or ``act(up)``."""
        ...

    def head_norm(self, half: AttentionHalf, name: str) -> Kernel:
        """The norm over each head that is the child ``name`` of the attention module.

        Whatever stands there when it is called: that layer may be converted or replaced later.
        """
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


def joined(linears: Sequence[NamedLinear]) -> tuple[Tensor, Tensor | None]:
    """The weights of the Linears as one, side by side, and their biases: all have some or none."""
    biases = [linear.bias for linear in linears]
    weight = join([linear.weight for linear in linears])
    return weight, None if biases[0] is None else join([b for b in biases if b is not None])


def own_head_norm(half: AttentionHalf, name: str) -> Kernel:
    """The module that stands there at each call: converted, or a copy that ``peft`` trains."""
    return lambda heads: half.module.get_submodule(name)(heads)


@dataclass
class Halves:
    """The halves of one block that are to be fused, and why not the others.

    ``causal``: whether its attention, fused or not, looks back alone. ``adapted``: the names of the
    model's layers that get adapters.
    """

    layout: BlockLayout
    attention: AttentionHalf | None = None
    mlp: MLPHalf | None = None
    reasons: list[str] = field(default_factory=list)
    adapted: frozenset[str] = frozenset()
    causal: bool = True

    @property
    def made(self) -> list[str]:
        """The names under which an engine makes parts of those that are to be fused."""
        halves = (half for half in (self.attention, self.mlp) if half is not None)
        return [name for half in halves for name in half.made]

    def refuse_attention(self, reason: str | None) -> None:
        """Gives that half up for ``reason``, if there is one."""
        if reason is not None:
            self.attention = None
            self.reasons.append(reason)

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
