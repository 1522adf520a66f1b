"""Finding every linear layer and norm of a model, and everything that is known about each place.

A *layer* here is one module object. It may stand at several places of the module tree under several
names; it is found once, named by its first place, and replaced at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from fp8core.conversion.attention import INPUT_PROJECTIONS, attention_refusal, input_projections
from fp8core.conversion.norms import is_norm
from fp8core.conversion.weight_views import plain_linear

__all__ = [
    "Layer",
    "declared_output_head",
    "find_layers",
    "is_conv1d",
    "output_heads",
    "replacement_refusal",
    "sequence_level_layers",
    "stacked_experts",
]

LayerKind = Literal["linear", "projection", "experts", "norm"]


@dataclass
class Layer:
    """One layer of a model: ``names[0]`` is the name it is reported under.

    A ``projection`` is a Linear that its module, an ``nn.MultiheadAttention``, has in Parameters
    only: ``part`` says which. ``experts`` are Linears stacked in the Parameter ``part`` of
    ``module``. ``attention``: the ``nn.MultiheadAttention`` that a projection, or the Linear that
    is its ``out_proj``, belongs to.
    """

    module: nn.Module
    kind: LayerKind
    names: list[str] = field(default_factory=list)
    part: str | None = None
    attention: nn.MultiheadAttention | None = None

    @property
    def name(self) -> str:
        return self.names[0]


def find_layers(model: nn.Module) -> list[Layer]:
    """Every linear layer and norm, in order.

    Linear layers are ``nn.Linear``, its subclasses, transformers' ``Conv1D``, the input projections
    of ``nn.MultiheadAttention`` and the experts that one Parameter stacks.
    """
    found: dict[tuple[int, str | None], Layer] = {}
    attention_of: dict[int, nn.MultiheadAttention] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for layer in _layers_of(module, attention_of.get(id(module))):
            key = (id(module), layer.part)
            inner = name if layer.part is None else f"{name}.{layer.part}".removeprefix(".")
            found.setdefault(key, layer).names.append(inner)
        if isinstance(module, nn.MultiheadAttention):
            attention_of[id(module.out_proj)] = module
    return list(found.values())


def _layers_of(module: nn.Module, attention: nn.MultiheadAttention | None) -> list[Layer]:
    if isinstance(module, nn.MultiheadAttention):
        return [Layer(module, "projection", [], part, module) for part in INPUT_PROJECTIONS]
    kind = _kind(module)
    if kind is not None:
        return [Layer(module, kind, attention=attention)]
    return [Layer(module, "experts", [], key) for key in stacked_experts(module)]


def stacked_experts(module: nn.Module) -> list[str]:
    """Keys of the Parameters of ``module`` that stack a weight of each expert: [experts, ...]."""
    if "Experts" not in type(module).__name__:
        return []
    return [key for key, p in module._parameters.items() if p is not None and p.dim() == 3]


def as_linear(layer: Layer) -> nn.Linear:
    """A linear layer as an ``nn.Linear`` over the same memory: what an engine is asked about."""
    module = layer.module
    if layer.kind == "projection":
        assert layer.attention is not None
        assert layer.part is not None
        return input_projections(layer.attention, layer.attention)[layer.part].as_linear()
    if is_conv1d(module):
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        return plain_linear(weight.t(), bias)
    assert isinstance(module, nn.Linear)
    if layer.attention is not None:
        return plain_linear(module.weight, module.bias)
    return module


def _kind(module: nn.Module) -> LayerKind | None:
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return "linear"
    return "norm" if is_norm(module) else None


def is_conv1d(module: nn.Module) -> bool:
    """transformers' ``Conv1D``, the Linear of GPT-2, whose weight lies transposed: [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def replacement_refusal(layer: Layer, referenced_elsewhere: set[int]) -> str | None:
    """Why this module cannot be exchanged for another without losing something, or None.

    ``referenced_elsewhere``: see ``references_outside_the_tree``.
    """
    module = layer.module
    kind = type(module)
    if layer.kind == "experts":
        stacked = module._parameters[str(layer.part)]
        assert stacked is not None
        return (
            f"it stacks the weights of {stacked.shape[0]} experts in one Parameter, and each of "
            "them sees as many tokens as are sent to it, which is no multiple of 16"
        )
    if layer.attention is not None:
        return attention_refusal(layer.attention, referenced_elsewhere)
    if layer.kind == "linear":
        if (
            isinstance(module, nn.modules.lazy.LazyModuleMixin)
            and module.has_uninitialized_params()
        ):
            return "its shape is not known before its first forward pass"
        if kind.__name__ == "NonDynamicallyQuantizableLinear":
            return "nn.MultiheadAttention reads its weight and never calls it"
        if kind is not nn.Linear and not is_conv1d(module):
            return f"{kind.__name__} is a subclass of nn.Linear and may compute something else"
        if module._parameters.get("weight") is None:
            return "its weight is not a Parameter of its own (it is computed by a hook)"
    if "forward" in module.__dict__:
        return "its forward was replaced on this one object"
    strangers = sorted(module._parameters.keys() - {"weight", "bias"})
    if strangers:
        return f"it holds further parameters: {', '.join(strangers)}"
    children = sorted(name for name, child in module._modules.items() if child is not None)
    if children:
        return f"it holds modules of its own: {', '.join(children)}"
    if id(module) in referenced_elsewhere:
        return (
            "another module holds it outside the module tree, where a replacement would not reach"
        )
    return None


def references_outside_the_tree(model: nn.Module) -> set[int]:
    """Ids of modules that some module keeps in a plain attribute, list, tuple or dict."""
    found: set[int] = set()
    for module in model.modules():
        for key, value in module.__dict__.items():
            if key in ("_modules", "_parameters", "_buffers") or key.endswith("_hooks"):
                continue
            found.update(id(item) for item in _modules_in(value))
    return found


def _modules_in(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, nn.Module))
    elif isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, nn.Module))


def output_heads(model: nn.Module) -> dict[int, str]:
    """Ids of the Linears that make the model's output, each with what makes it one.

    Those are: what a transformers model calls its output embeddings; a Linear that shares its
    weight with an Embedding; and, in a model that classifies, a Linear outside the base model with
    one output per class.
    """
    heads: dict[int, str] = {}
    declared = declared_output_head(model)
    if declared is not None:
        heads[id(declared)] = "it is the output head"
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module._parameters.get("weight")) in embeddings:
            heads.setdefault(id(module), "it is the output head (tied to an embedding)")
    labels = _number_of_labels(model)
    if labels is not None:
        for module in _outside_base_model(model):
            if isinstance(module, nn.Linear) and module.out_features == labels:
                heads.setdefault(id(module), "it is the output head")
    return heads


def sequence_level_layers(model: nn.Module) -> set[int]:
    """Ids of the Linears that see one row per sequence instead of one per token.

    Poolers, and the head of a model that classifies whole sequences. Their row count is the batch
    size, which no padding makes a multiple of 16.
    """
    found: set[int] = set()
    for module in model.modules():
        if type(module).__name__.endswith("Pooler"):
            found.update(id(m) for m in module.modules() if isinstance(m, nn.Linear))
    if _number_of_labels(model) is not None:
        found.update(id(m) for m in _outside_base_model(model) if isinstance(m, nn.Linear))
    return found


def declared_output_head(model: nn.Module) -> nn.Module | None:
    """What a transformers model calls its output embeddings, if it has some."""
    getter = getattr(model, "get_output_embeddings", None)
    if not callable(getter):
        return None
    try:
        head = getter()
    except (AttributeError, NotImplementedError):  # a model class without such a head
        return None
    return head if isinstance(head, nn.Module) else None


def _number_of_labels(model: nn.Module) -> int | None:
    """The number of classes where ``model`` is one of transformers' sequence classifiers."""
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return None
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    return labels if isinstance(labels, int) else None


def _outside_base_model(model: nn.Module) -> Iterator[nn.Module]:
    base = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    inside = {id(module) for module in base.modules()} if isinstance(base, nn.Module) else set()
    for module in model.modules():
        if module is not model and id(module) not in inside:
            yield module


def is_meta(module: nn.Module) -> bool:
    """Whether any parameter of ``module`` has no storage (a model that is only a shape)."""
    return any(parameter.device == torch.device("meta") for parameter in module.parameters())
