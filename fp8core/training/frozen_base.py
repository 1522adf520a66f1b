"""The frozen base of a job with adapters, kept in FP8: a byte a weight instead of two or four.

What is frozen never changes, and the GEMMs of converted layers read nothing of it but its cast. So
the cast is made once, when the adapters stand beside their layers and the base's digest was taken
of the original values, and takes the place of the weights, GEMM by GEMM.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8core.conversion import ConversionReport
from fp8core.conversion.find import is_conv1d
from fp8core.conversion.report import ConversionRow
from fp8core.engines.gemm_watch import format_of
from fp8core.engines.protocol import Engine, StoringEngine
from fp8core.errors import SpecRefused
from fp8core.fusion.adapters import Adapters
from fp8core.numerics.float8_weight import Float8Weight, cast_weight

__all__ = ["StoredBase", "store_base"]

_POINTER = "/adapter/base_weights"


@dataclass
class StoredBase:
    """What became of the frozen weights of converted layers.

    ``gemms``: how many of them read stored weights; ``kept``: layers whose weights stay as they
    were, each with why.
    """

    gemms: int = 0
    elements: int = 0
    kept: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        because = Counter(self.kept.values())
        return {
            "gemms": self.gemms,
            "weights": self.elements,
            "kept": len(self.kept),
            "kept_because": dict(because.most_common()),
        }


def store_base(report: ConversionReport, engine: Engine) -> StoredBase:
    """Casts what is frozen of ``report.model`` and computes in FP8; says so in the report.

    Its other Parameters stay as they are; those that are cast remain the objects that they were.
    The memory grows by the cast of one GEMM's weights, at most, before that of the weights is
    free. Raises ``SpecRefused`` where the engine keeps no weights so, or no layer is left to it.
    """
    if not isinstance(engine, StoringEngine):
        raise SpecRefused(
            f"the engine {engine.name} keeps no weights in FP8; leave base_weights out",
            pointer=_POINTER,
        )
    # A Parameter is exchanged where no graph holds it; those of proofs may wait to be collected.
    gc.collect()
    found, formats = StoredBase(), set[str]()
    holders = _holders(report.model)
    for module, layers in list(_gemms(report)):
        reasons = [_refusal(name, layer, holders) for name, layer in layers]
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None and not engine.reads_stored_weights(module):
            reason = f"{type(module).__name__} reads its weights in another way"
        if reason is not None:
            found.kept.update({name: reason for name, _ in layers})
            continue
        formats.add(format_of(layers[0][1]._parameters["weight"]))
        found.elements += _store([layer for _, layer in layers], engine.stores_powers_of_two)
        found.gemms += 1
    if not found.gemms:
        why = "; ".join(dict.fromkeys(found.kept.values())) or "none of its layers is converted"
        raise SpecRefused(
            f"no frozen weight of this model is read in FP8 alone ({why}); leave base_weights out",
            pointer=_POINTER,
        )
    if engine.device.type == "cuda":
        # What is free lies in pieces of the weights' sizes, which few activations have.
        torch.cuda.empty_cache()
    came = ", ".join(sorted(formats))
    report.others.append(ConversionRow("frozen weights", came, "fp8_e4m3", None, _why(found)))
    report.base_weights = found
    return found


def _why(found: StoredBase) -> str | None:
    because = Counter(found.kept.values())
    texts = [f"{count} layers keep theirs: {reason}" for reason, count in because.most_common(3)]
    return "; ".join(texts) or None


def _gemms(
    report: ConversionReport,
) -> Iterator[tuple[nn.Module, list[tuple[str, nn.Module]]]]:
    """What computes each GEMM in FP8, with the layers that hold its weights, side by side."""
    kept = {row.name for row in report.kept}
    for block in [] if report.fusion is None else report.fusion.blocks:
        layers = {linear.name: linear.module for linear in block.linears}
        for module, gemms in block.modules.values():
            if isinstance(module, Adapters):
                continue
            for names in gemms:
                if not kept.intersection(names):
                    yield module, [(name, layers[name]) for name in names]
    for item in report.replacements:
        if not item.holds_layers and hasattr(item.replacement, "out_features"):
            yield item.replacement, [(item.name, item.replacement)]


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """The names under which each Parameter stands in the model."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[id(parameter)].append(f"{name}.{key}")
    return found


def _refusal(name: str, layer: nn.Module, holders: dict[int, list[str]]) -> str | None:
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is a part of another module's"
    if weight.requires_grad:
        return "it is trained"
    if len(holders[id(weight)]) > 1:
        return "its weight is also that of another module, which reads it as it is"
    return None


def _store(layers: Sequence[nn.Module], power_of_two: bool) -> int:
    """Casts the weights of one GEMM; how many elements they have."""
    parameters = [layer._parameters["weight"] for layer in layers]
    # A Conv1D's lies the other way round, and so do the weights that an engine sees transposed.
    turned = [_lies_turned(layer) for layer in layers]
    values = [p.detach().t() if t else p.detach() for p, t in zip(parameters, turned, strict=True)]  # type: ignore[union-attr]
    casts = cast_weight(values, power_of_two=power_of_two)
    del values
    for parameter, cast, over in zip(parameters, casts, turned, strict=True):
        stored = cast.t() if over else cast
        assert isinstance(stored, Float8Weight)
        # All that hold the Parameter, such as the modules of a fused block, hold the cast then.
        torch.utils.swap_tensors(parameter, nn.Parameter(stored, requires_grad=False))
    return sum(cast.numel() for cast in casts)


def _lies_turned(layer: nn.Module) -> bool:
    if is_conv1d(layer):
        return True
    held, read = layer._parameters["weight"], layer.weight
    assert held is not None
    assert isinstance(read, torch.Tensor)
    return read is not held and held.shape[::-1] == read.shape
