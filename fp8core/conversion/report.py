"""The conversion report: what became of every linear layer and norm of a model, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from fp8core.conversion.key_map import KeyMap

if TYPE_CHECKING:
    from fp8core.conversion.small_gemm import SmallGemms
    from fp8core.fusion.fuse import ModelFusion
    from fp8core.training.frozen_base import StoredBase

__all__ = ["ConversionReport", "ConversionRow", "Replacement", "count_rows"]

_ATTENTION = "DotProductAttention"


@dataclass(frozen=True)
class ConversionRow:
    """One Linear or norm: its name, its class before, and its class after or why it was kept.

    Both where it is part of a block that is fused in high precision. ``group``: the half of a fused
    block that it is part of.
    """

    name: str
    from_: str
    to: str | None
    group: str | None
    reason: str | None

    def to_json(self) -> dict[str, str | None]:
        return {
            "name": self.name,
            "from": self.from_,
            "to": self.to,
            "group": self.group,
            "reason": self.reason,
        }


@dataclass
class Replacement:
    """One exchanged module: what ``restore`` needs to put the original object back.

    ``original`` holds no Parameter while it is out of the model, so that an engine that keeps its
    weights otherwise does not pay for them twice. ``own_hooks`` are the keys of the hooks that the
    replacement brought with it, by hook attribute. ``holds_layers``: the replacement computes in
    the engine's precision only where layers inside of it do. ``without_nesting``: encoders that
    were kept from giving it nested tensors.
    """

    name: str
    original: nn.Module
    replacement: nn.Module
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    own_hooks: dict[str, tuple[int, ...]]
    holds_layers: bool = False
    without_nesting: list[nn.TransformerEncoder] = field(default_factory=list)


@dataclass
class ConversionReport:
    """What ``convert`` did. ``rows`` has one for every linear layer and norm, in the model's order.

    ``model`` is the model after conversion: the object that was given, unless that object was
    itself a layer that was replaced. ``key_map`` leads from the converted model's state-dict keys
    to the original ones and back.
    """

    model: nn.Module
    rows: list[ConversionRow]
    key_map: KeyMap = field(default_factory=KeyMap)
    replacements: list[Replacement] = field(default_factory=list)
    fusion: ModelFusion | None = None
    """The fused blocks; None where none was looked for."""
    small_gemms: SmallGemms | None = None
    """What the small-GEMM rule came to; None where none was asked for."""
    base_weights: StoredBase | None = None
    """What of a frozen base lies in FP8; None where none of it was to."""
    others: list[ConversionRow] = field(default_factory=list)
    """What else of the model was to be exchanged: how all of it attends, what frozen weights lie
    in."""

    def converted_layers(self) -> dict[str, nn.Module]:
        """The layers that compute in the engine's precision now, by name: what can be put back.

        Of a fused layer the module that holds its Parameters.
        """
        layers = {
            item.name: item.replacement for item in self.replacements if not item.holds_layers
        }
        if self.fusion is not None:
            kept = {row.name for row in self.kept}
            layers |= {
                name: self.model.get_submodule(name)
                for name in self.fusion.layers
                if name not in kept
            }
        return layers

    @property
    def converted(self) -> list[ConversionRow]:
        return [row for row in self.rows if row.reason is None]

    @property
    def kept(self) -> list[ConversionRow]:
        return [row for row in self.rows if row.reason is not None]

    def to_json(self) -> list[dict[str, str | None]]:
        """The rows as ``{"name", "from", "to", "group", "reason"}``; reason null: converted.

        Behind those of the layers stand those of the blocks that fusion looked at, of attention
        that was to compute in FP8, and of what is not one layer's.
        """
        blocks = [] if self.fusion is None else self.fusion.rows
        attention = {} if self.fusion is None else self.fusion.fp8_attention
        return [
            *(row.to_json() for row in self.rows),
            *(ConversionRow(b.name, b.kind, b.to, None, b.reason).to_json() for b in blocks),
            *(
                ConversionRow(
                    name, _ATTENTION, None if reason else f"FP8{_ATTENTION}", None, reason
                ).to_json()
                for name, reason in attention.items()
            ),
            *(row.to_json() for row in self.others),
        ]


def count_rows(rows: list[ConversionRow]) -> dict[str, object]:
    """Counts for a person: ``{"layers", "converted", "kept", "kept_because": {reason: count}}``."""
    kept = Counter(row.reason for row in rows if row.reason is not None)
    return {
        "layers": len(rows),
        "converted": len(rows) - kept.total(),
        "kept": kept.total(),
        "kept_because": {str(reason): count for reason, count in kept.most_common()},
    }
