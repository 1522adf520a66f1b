"""Converting a model in place: one layer at a time, weights moved and never copied."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from fp8core.conversion.decide import Decision, decide
from fp8core.conversion.find import is_meta
from fp8core.conversion.replace import put_in_place, take_over
from fp8core.conversion.report import ConversionReport, ConversionRow
from fp8core.conversion.restore import restore
from fp8core.engines.protocol import Engine
from fp8core.spec import Conversion

if TYPE_CHECKING:
    from fp8core.fusion import ModelFusion

__all__ = ["convert"]


def convert(
    model: nn.Module,
    engine: Engine,
    conversion: Conversion,
    *,
    apart: Mapping[str, str] = MappingProxyType({}),
) -> ConversionReport:
    """Replace what ``engine`` can take and ``conversion`` asks for; say what became of the rest.

    The new modules hold the same Parameter objects, so ties, ``requires_grad``, dtype and device
    stay, and an optimizer made before stays right; training mode, hooks, buffers and the order of
    modules stay too. ``report.model`` is the converted model (another object than ``model`` only
    where ``model`` itself is a layer). Decoder blocks are fused where the engine can and
    ``conversion.fuse`` lets it; ``apart``: layers that are not to be part of that, each with why.

    Raises ``SpecRefused`` for a pattern that matches nothing and ValueError for a model on the
    meta device. If the engine fails on a layer, the layers before it are restored.
    """
    if is_meta(model):
        raise ValueError("a model on the meta device has no weights to convert; see decide()")
    report = ConversionReport(model=model, rows=[])
    try:
        decisions = decide(model, engine, conversion)
        report.fusion = _fuse(model, engine, conversion, decisions, apart)
        for decision in decisions:
            report.rows.append(_apply(report, decision, engine))
    except BaseException:
        restore(report.model, report)
        raise
    return report


def _fuse(
    model: nn.Module,
    engine: Engine,
    conversion: Conversion,
    decisions: list[Decision],
    apart: Mapping[str, str],
) -> ModelFusion | None:
    from fp8core.fusion import FusingEngine, fuse  # it describes norms as this package does

    if conversion.fuse == "none" or not isinstance(engine, FusingEngine):
        return None
    if engine.fusion_refusal() is not None:
        return None
    kept = {d.layer.name: d.reason for d in decisions if d.reason is not None}
    return fuse(model, engine.block_parts(), {**apart, **kept})


def _apply(report: ConversionReport, decision: Decision, engine: Engine) -> ConversionRow:
    layer = decision.layer
    source = type(layer.module).__name__
    if decision.reason is not None:
        return ConversionRow(layer.name, source, None, None, decision.reason)
    if report.fusion is not None and layer.name in report.fusion.layers:
        half = report.fusion.layers[layer.name]
        kind = report.fusion.classes[layer.name]
        return ConversionRow(layer.name, source, kind, half, None)
    if decision.norm is not None:
        replacement = engine.convert_norm(decision.norm, layer.name)
    else:
        assert isinstance(layer.module, nn.Linear)
        replacement = engine.convert_linear(layer.module, layer.name)
    report.replacements.append(take_over(layer.name, layer.module, replacement))
    report.model = put_in_place(report.model, layer.module, replacement)
    return ConversionRow(layer.name, source, type(replacement).__name__, None, None)
