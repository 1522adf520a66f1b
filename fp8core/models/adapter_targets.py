"""Which linear layers of a model get a LoRA adapter. Needs no weights: meta will do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fp8core.conversion.find import Layer, find_layers, output_heads, sequence_level_layers
from fp8core.conversion.patterns import first_match, unmatched
from fp8core.errors import SpecRefused
from fp8core.spec import LoraAdapter

__all__ = ["adapter_targets", "trained_heads"]

_POINTER = "/adapter/target_modules"


def adapter_targets(model: nn.Module, adapter: LoraAdapter) -> list[Layer]:
    """The layers of ``model``, before it is converted, that get an adapter, in the model's order.

    Never the output head, which may share its weight with the embedding, nor a classifier's head,
    which is trained as a whole; nor the projections of an ``nn.MultiheadAttention``, which reads
    their weights and would pass by what stands beside them. Raises ``SpecRefused`` for a pattern
    that matches no other layer.
    """
    heads = output_heads(model).keys() | sequence_level_layers(model)
    layers = [
        layer
        for layer in find_layers(model)
        if layer.kind == "linear" and layer.attention is None and id(layer.module) not in heads
    ]
    if adapter.target_modules == "linear":
        found = layers
    else:
        _check_patterns(adapter.target_modules, layers)
        found = [layer for layer in layers if first_match(adapter.target_modules, layer.names)]
    if not found:
        raise SpecRefused("this model has no linear layer for an adapter", pointer=_POINTER)
    return found


def trained_heads(model: nn.Module) -> list[str]:
    """Names of the modules of a sequence classifier that a base model does not have.

    Its head and its pooler; they are trained as a whole. Empty for any other model.
    """
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return []
    base = str(getattr(model, "base_model_prefix", ""))
    heads = [
        name
        for name, child in model.named_children()
        if name != base and any(True for _ in child.parameters())
    ]
    poolers = [n for n, m in model.named_modules() if type(m).__name__.endswith("Pooler")]
    return heads + poolers


def _check_patterns(patterns: Sequence[str], layers: Sequence[Layer]) -> None:
    names = [name for layer in layers for name in layer.names]
    for index in unmatched(patterns, names):
        raise SpecRefused(
            f"{patterns[index]!r} matches no linear layer that can have an adapter; names look "
            f"like {', '.join(names[:3]) or '(there is none)'}",
            pointer=f"{_POINTER}/{index}",
        )
