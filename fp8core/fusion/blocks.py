"""A block that computes its output through fused parts, and can go back at any time.

The layer object stays in the model with all its children, Parameters and hooks; its class becomes a
subclass of its own whose ``forward`` takes the fused way. What that way does not serve (a key-value
cache, a mask of the caller's own) takes the layer's own, with the same Parameters and without FP8;
in training that is warned of.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.data.attention import BY_DOCUMENTS
from fp8core.fusion.adapted import JoinedLinears, Modules, OneLinear, SteppedMLP
from fp8core.fusion.adapters import Beside
from fp8core.fusion.block_inputs import ELSEWHERE, AskedBlock, named_inputs, unread
from fp8core.fusion.documents import SEQUENCES
from fp8core.fusion.joined import lay_together
from fp8core.fusion.layouts import PassedBy, through
from fp8core.fusion.parts import (
    AttentionHalf,
    BlockParts,
    Halves,
    MLPHalf,
    NamedLinear,
    split_heads,
)
from fp8core.fusion.rotary import RotaryAngles
from fp8core.fusion.sequences import Sequences

__all__ = ["FusedAttention", "FusedBlock", "FusedMLP"]

_HELD = "_fused_block"
_PLAIN = (
    "a fused block computes as its model does, without FP8, as it was called with a mask or a "
    "key-value cache: call the model with `use_cache=False` and what `fused_inputs` gives"
)


class FusedAttention:
    """``o(attention(rotate(q), rotate(k), v))`` of the input, normalised where the half says so."""

    def __init__(
        self,
        half: AttentionHalf,
        parts: BlockParts,
        angles: RotaryAngles | None,
        beside: Beside,
        passed_by: PassedBy,
    ) -> None:
        if half.rotated and angles is None:
            raise ValueError("attention that is rotated needs angles")
        self.half = half
        self.group = half.group
        lay_together([linear.parameter for linear in half.inputs])
        biases = [linear.bias for linear in half.inputs]
        lay_together([bias for bias in biases if bias is not None])
        self._parts = parts
        self._angles = angles
        self._bare = beside.bare(passed_by, half.head_norm_names)
        self.norm_qkv = JoinedLinears(half.norm, half.inputs, self.group, parts, beside)
        if half.head_norms:
            self.norm_query, self.norm_key = (
                parts.head_norm(half, name) for name in ("q_norm", "k_norm")
            )
        self.attend = parts.attention(half)
        self.output = OneLinear(half.o, parts, beside)

    def __call__(self, x: Tensor, sequences: Sequences) -> Tensor:
        self._bare.raise_if_replaced()
        half = self.half
        joined = self.norm_qkv(x)
        if self._angles is None:
            query, key, value = split_heads(joined, half)
            return self.output(self.attend(query, key, value, sequences))
        angles = self._angles.upto(sequences.length, x.device)
        if half.head_norms:
            query, key, value = split_heads(joined, half)
            query, key = self.norm_query(query), self.norm_key(key)
            # Norms with fp32 weights give fp32, and attention takes one dtype.
            query, key = query.to(value.dtype), key.to(value.dtype)
            query = self._parts.rotate(query, angles, sequences)
            key = self._parts.rotate(key, angles, sequences)
        else:
            query, key, value = self._parts.split_rotated(joined, half, angles, sequences)
        return self.output(self.attend(query, key, value, sequences))


class FusedMLP:
    """``down(act(gate) * up)`` of the normalised input, or ``down(act(up))``.

    Beside it the normalised input, where the half says so.
    """

    def __init__(
        self, half: MLPHalf, parts: BlockParts, beside: Beside, passed_by: PassedBy
    ) -> None:
        self.half = half
        self.group = half.group
        lay_together([linear.parameter for linear in half.inputs])
        linears = (*half.inputs, half.down)
        self._bare = beside.bare(passed_by)
        self.norm_mlp: Any
        # One module for both GEMMs would compute GELU in its tanh approximation.
        in_one = parts.mlp_in_one and half.activation != "gelu_erf"
        if not in_one or beside.adapters(linears) is not None:
            self.norm_mlp = SteppedMLP(half, parts, beside)
        elif half.returns_norm:
            self.norm_mlp = parts.norm_mlp_and_norm(half)
        else:
            self.norm_mlp = parts.norm_mlp(half)

    def __call__(self, x: Tensor) -> Any:
        self._bare.raise_if_replaced()
        return self.norm_mlp(x)

    @property
    def whole(self) -> bool:
        """Whether one module computes both GEMMs."""
        return not isinstance(self.norm_mlp, SteppedMLP)


class FusedBlock:
    """The fused parts of one block. ``install`` puts them to work, ``remove`` takes them out."""

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        halves: Halves,
        parts: BlockParts,
        angles: RotaryAngles | None,
    ) -> None:
        self.name = name
        self.layer = layer
        self.layout = halves.layout
        self.causal = halves.causal
        self._kinds = parts.kinds
        self.attention: FusedAttention | None = None
        self.mlp: FusedMLP | None = None
        beside = Beside(layer, name, halves.adapted)
        if halves.attention is not None:
            passed_by = self.layout.without_attention
            self.attention = FusedAttention(halves.attention, parts, angles, beside, passed_by)
        if halves.mlp is not None:
            self.mlp = FusedMLP(halves.mlp, parts, beside, self.layout.without_mlp)
        self._own_class = type(layer)

    def __deepcopy__(self, _: object) -> FusedBlock:
        """None is made: parts hold weights of their own, and some of a copy's are the original's.

        So ``peft``'s ``modules_to_save`` of a whole block is refused too.
        """
        raise TypeError(
            f"{self.name} is fused, and a copy of it would compute with weights of the original: "
            "restore the model first, or fuse no blocks (conversion.fuse: none)"
        )

    @property
    def asked(self) -> AskedBlock:
        """It and what of it is fused now, to be asked what it cannot read."""
        return AskedBlock(self.name, self.layer, self.layout, self.attention is not None)

    @property
    def installed(self) -> bool:
        return self.layer.__dict__.get(_HELD) is self

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The layers that are part of each fused half, by the half's name."""
        halves = [half for half in (self.attention, self.mlp) if half is not None]
        return {half.half.name: half.half.layers for half in halves}

    @property
    def linears(self) -> list[NamedLinear]:
        """The linear layers that are part of a fused half."""
        found: list[NamedLinear] = []
        if self.attention is not None:
            found += [*self.attention.half.inputs, self.attention.half.o]
        if self.mlp is not None:
            found += [*self.mlp.half.inputs, self.mlp.half.down]
        return found

    @property
    def classes(self) -> dict[str, str]:
        """The class of the fused module that each of those layers is part of."""
        found: dict[str, str] = {}
        if self.attention is not None:
            *together, output = self.attention.half.layers
            kind = "linear" if self.attention.half.norm is None else "norm_linear"
            found.update(dict.fromkeys(together, self._kinds[kind]))
            found[output] = self._kinds["linear"]
        if self.mlp is not None:
            *together, output = self.mlp.half.layers
            kind = self._kinds["norm_mlp" if self.mlp.whole else "norm_linear"]
            found.update(dict.fromkeys(together, kind))
            found[output] = kind if self.mlp.whole else self._kinds["linear"]
        return found

    @property
    def modules(self) -> Modules:
        """The modules that compute in the layers' place, with the layers of each of their GEMMs.

        By name; parts that are no modules are not among them. Adapters beside the layers are.
        """
        found: Modules = {}
        if self.attention is not None:
            found |= {**self.attention.norm_qkv.modules, **self.attention.output.modules}
        if self.mlp is not None and isinstance(self.mlp.norm_mlp, SteppedMLP):
            found |= self.mlp.norm_mlp.modules
        elif self.mlp is not None:
            mlp = self.mlp.half
            up, down = tuple(linear.name for linear in mlp.inputs), (mlp.down.name,)
            found[self.mlp.group] = (self.mlp.norm_mlp, (up, down))
        return {name: pair for name, pair in found.items() if isinstance(pair[0], nn.Module)}

    @property
    def made(self) -> list[str]:
        """The names under which parts were made."""
        halves = [half for half in (self.attention, self.mlp) if half is not None]
        return [name for half in halves for name in half.half.made]

    def install(self) -> None:
        self.layer.__class__ = _fused_class(self._own_class)  # type: ignore[arg-type]  # a type is hashable
        self.layer.__dict__[_HELD] = self

    def remove(self) -> None:
        """The layer computes as it did before; its Parameters stay as they are now."""
        if self.installed:
            del self.layer.__dict__[_HELD]
            self.layer.__class__ = self._own_class

    def remove_half(self, name: str) -> None:
        if self.attention is not None and self.attention.half.name == name:
            self.attention = None
        if self.mlp is not None and self.mlp.half.name == name:
            self.mlp = None
        if self.attention is None and self.mlp is None:
            self.remove()

    def __call__(self, hidden: Tensor, sequences: Sequences, options: dict[str, Any]) -> Tensor:
        attend, mlp = self.attention, self.mlp
        attention = None if attend is None else lambda x: attend(x, sequences)
        if attend is None:
            options = {**options, SEQUENCES: sequences}
        return through(self.layer, self.layout, hidden, attention, mlp, options)


def _makes_masks(attention: nn.Module) -> bool:
    """Whether the model would have made a mask where its rows are more than one sequence each.

    For flash attention it makes none, and what lies in a row is told by positions alone.
    """
    config = getattr(attention, "config", None)
    return getattr(config, "_attn_implementation", "eager") in ("eager", "sdpa", BY_DOCUMENTS)


@functools.cache
def _fused_class(kind: Any) -> Any:
    own_forward = kind.forward

    @functools.wraps(own_forward)
    def forward(self: Any, hidden_states: Tensor, *positional: Any, **options: Any) -> Any:
        sequences = options.pop(SEQUENCES, None)
        block: FusedBlock = self.__dict__[_HELD]
        options = named_inputs(own_forward, positional, options)
        if sequences is not None:
            block.asked.raise_if_unread(options)
        elsewhere = any(options.get(name) is not None for name in ELSEWHERE)
        elsewhere |= block.attention is not None and bool(unread(block.layout, options))
        unmasked = sequences is None and options.get("attention_mask") is None
        attention = self.get_submodule(block.layout.attention)
        if unmasked and not elsewhere and _makes_masks(attention):
            # No mask means over each row, causal or not.
            sequences = Sequences(*hidden_states.shape[:2])
        if sequences is None or elsewhere:
            if sequences is not None:
                options[SEQUENCES] = sequences
            if self.training and torch.is_grad_enabled():
                warnings.warn(_PLAIN, stacklevel=2)
            return own_forward(self, hidden_states, **options)
        given = {name: value for name, value in options.items() if name not in ELSEWHERE}
        return block(hidden_states, sequences, given)

    members = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(f"Fused{kind.__name__}", (kind,), members)
