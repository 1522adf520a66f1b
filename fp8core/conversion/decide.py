"""Which layers a recipe converts, and why not the others. Needs no weights: meta will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from fp8core.conversion.find import (
    Layer,
    as_linear,
    find_layers,
    output_heads,
    references_outside_the_tree,
    replacement_refusal,
    sequence_level_layers,
)
from fp8core.conversion.norms import describe_norm
from fp8core.conversion.patterns import first_match, unmatched
from fp8core.engines.protocol import NormDescription
from fp8core.errors import SpecRefused
from fp8core.spec import Conversion

__all__ = ["Decision", "Refusals", "decide", "kept_apart"]


class Refusals(Protocol):
    """What an engine cannot take. Every ``Engine`` is one; so are shape rules without hardware."""

    def linear_refusal(self, linear: nn.Linear) -> str | None: ...

    def norm_refusal(self, norm: NormDescription) -> str | None: ...


@dataclass
class Decision:
    """What to do with one layer: ``reason`` is why it is kept, None where it is converted.

    ``may_fuse``: whether it may be part of a fused block in high precision though it is kept. So it
    may where the engine or the small-GEMM rule keeps it, which say how it is to compute, and not
    where the spec or the model does, which say that it is to stay.
    """

    layer: Layer
    reason: str | None
    norm: NormDescription | None = None
    may_fuse: bool = False


def decide(model: nn.Module, engine: Refusals, conversion: Conversion) -> list[Decision]:
    """One decision for every linear layer and norm of ``model``, in the model's order.

    Raises ``SpecRefused`` for a ``skip`` or ``only`` pattern that speaks of no layer at all: most
    likely a misspelling, and the job would train other layers than was meant.
    """
    layers = find_layers(model)
    _check_patterns(layers, conversion.skip, "/conversion/skip")
    _check_patterns(layers, conversion.only or [], "/conversion/only")
    elsewhere = references_outside_the_tree(model)
    heads = output_heads(model)
    sequence_level = sequence_level_layers(model)
    decisions = []
    for layer in layers:
        reason = _asked_to_keep(layer, conversion)
        if reason is None and layer.kind != "norm":
            reason = replacement_refusal(layer, elsewhere)
            if reason is None and not conversion.output_head:
                head = heads.get(id(layer.module))
                reason = None if head is None else f"{head}; conversion.output_head is false"
            if reason is None and id(layer.module) in sequence_level:
                reason = "it sees one row per sequence, and FP8 GEMMs need a multiple of 16 rows"
            by_engine = reason is None
            if by_engine:
                reason = engine.linear_refusal(as_linear(layer))
            decisions.append(Decision(layer, reason, may_fuse=by_engine and reason is not None))
        elif reason is None:
            decisions.append(_decide_norm(layer, engine, conversion, elsewhere))
        else:
            decisions.append(Decision(layer, reason))
    if conversion.keep_first_last:
        _keep_first_and_last(decisions)
    return decisions


def kept_apart(decisions: Sequence[Decision], *, plain: bool) -> dict[str, str]:
    """The layers that no fused block may hold, each with why.

    ``plain``: whether blocks are fused in high precision.
    """
    return {
        decision.layer.name: decision.reason
        for decision in decisions
        if decision.reason is not None and not (plain and decision.may_fuse)
    }


def _check_patterns(layers: Sequence[Layer], patterns: Sequence[str], pointer: str) -> None:
    names = [name for layer in layers for name in layer.names]
    for index in unmatched(patterns, names):
        inner = f"{patterns[index]}.*"
        if first_match([inner], names) is not None:
            hint = f"{inner!r} would match what lies inside it"
        else:
            hint = f"names look like {', '.join(names[:3])}" if names else "it has none"
        raise SpecRefused(
            f"{patterns[index]!r} matches no Linear or norm of this model; {hint}",
            pointer=f"{pointer}/{index}",
        )


def _asked_to_keep(layer: Layer, conversion: Conversion) -> str | None:
    if layer.kind != "norm" and not conversion.linear:
        return "conversion.linear is false"
    matched = first_match(conversion.skip, layer.names)
    if matched is not None:
        return f"conversion.skip names it: {matched}"
    if conversion.only is not None and first_match(conversion.only, layer.names) is None:
        return "no pattern of conversion.only matches it"
    return None


def _decide_norm(
    layer: Layer, engine: Refusals, conversion: Conversion, elsewhere: set[int]
) -> Decision:
    reason = replacement_refusal(layer, elsewhere)
    if reason is not None:
        return Decision(layer, reason)
    norm = describe_norm(layer.module)
    if isinstance(norm, str):
        return Decision(layer, norm)
    wanted = conversion.layer_norm if norm.kind == "layer_norm" else conversion.rms_norm
    if not wanted:
        return Decision(layer, f"conversion.{norm.kind} is false")
    reason = engine.norm_refusal(norm)
    return Decision(layer, reason, norm if reason is None else None, may_fuse=reason is not None)


def _keep_first_and_last(decisions: list[Decision]) -> None:
    """Of the Linears that would convert, those at either end are the most sensitive ones."""
    linears = [d for d in decisions if d.layer.kind != "norm" and d.reason is None]
    for decision, place in zip(linears[:1] + linears[1:][-1:], ("first", "last"), strict=False):
        decision.reason = f"it is the {place} Linear; conversion.keep_first_last is true"
