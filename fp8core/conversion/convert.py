"""Converting a model in place: one layer at a time, weights moved and never copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from fp8core.conversion.attention import ProjectedAttention, encoders_around
from fp8core.conversion.decide import Decision, decide, kept_apart
from fp8core.conversion.find import Layer, as_linear, is_conv1d, is_meta
from fp8core.conversion.replace import put_in_place, take_over
from fp8core.conversion.report import ConversionReport, ConversionRow
from fp8core.conversion.restore import restore
from fp8core.conversion.small_gemm import SmallGemmRule, keep_small_gemms
from fp8core.conversion.weight_views import see_part, see_transposed
from fp8core.engines.protocol import Engine
from fp8core.errors import SpecRefused
from fp8core.spec import Conversion

if TYPE_CHECKING:
    from fp8core.fusion import ModelFusion, PlannedAdapters

__all__ = ["convert"]


def convert(
    model: nn.Module,
    engine: Engine,
    conversion: Conversion,
    *,
    adapters: PlannedAdapters | None = None,
    small_gemms: SmallGemmRule | str | Mapping[str, str] | None = None,
    length: int | None = None,
) -> ConversionReport:
    """Replace what ``engine`` can take and ``conversion`` asks for; say what became of the rest.

    The new modules hold the same Parameter objects, so ties, ``requires_grad``, dtype and device
    stay, and an optimizer made before stays right; training mode, hooks, buffers and the order of
    modules stay too. ``report.model`` is the converted model (another object than ``model`` only
    where ``model`` itself is a layer). Blocks are fused where the engine can and
    ``conversion.fuse`` lets it; ``adapters``: those that ``peft`` will put around layers of
    ``report.model``, which such a block has to be told of. ``small_gemms``: by what layers stay in
    bf16 that FP8 would slow down (`keep_small_gemms`). ``length``: of the longest row that the
    model will be given, for which fusion is proved (`fp8core.fusion.fuse`).

    Raises ``SpecRefused`` for a pattern that matches nothing and ValueError for a model on the
    meta device. If the engine fails on a layer, the layers before it are restored.
    """
    if is_meta(model):
        raise ValueError("a model on the meta device has no weights to convert; see decide()")
    report = ConversionReport(model=model, rows=[])
    try:
        decisions = decide(model, engine, conversion)
        fused = _fuses(report, engine, conversion)
        if small_gemms is not None:
            report.small_gemms = keep_small_gemms(model, decisions, small_gemms, fused=fused)
        if fused:
            report.fusion = _fuse(report, engine, decisions, adapters, length)
        for decision in decisions:
            report.rows.append(_apply(report, decision, engine))
        _require_fp8_attention(engine, report.fusion)
    except BaseException:
        restore(report.model, report)
        raise
    return report


def _fuses(report: ConversionReport, engine: Engine, conversion: Conversion) -> bool:
    from fp8core.fusion import FusingEngine  # it describes norms as this package does

    if conversion.fuse == "none" or not isinstance(engine, FusingEngine):
        return False
    return not _refused(report, engine.fusion_refusal())


def _refused(report: ConversionReport, refusal: str | None) -> bool:
    if refusal is not None:
        report.others.append(ConversionRow("blocks", "fuse: auto", None, None, refusal))
    return refusal is not None


def _fuse(
    report: ConversionReport,
    engine: Any,
    decisions: list[Decision],
    adapters: PlannedAdapters | None,
    length: int | None,
) -> ModelFusion | None:
    """In high precision where the engine converts nothing, or the small-GEMM rule lets it not."""
    from fp8core.fusion import fuse, high_precision
    from fp8core.fusion.recognise import NO_BLOCKS

    small = report.small_gemms is not None and bool(report.small_gemms.kept)
    if small:
        if _refused(report, high_precision.refusal(engine.device, engine.compute_dtype)):
            return None
        parts = high_precision.HighPrecisionParts(engine.compute_dtype)
    else:
        parts = engine.block_parts()
    kept = kept_apart(decisions, plain=small or engine.fuses_what_it_keeps)
    fusion = fuse(report.model, parts, kept, adapters=adapters, length=length)
    _refused(report, None if fusion.candidates else NO_BLOCKS)
    return fusion


def _apply(report: ConversionReport, decision: Decision, engine: Engine) -> ConversionRow:
    layer = decision.layer
    source = type(layer.module).__name__
    if report.fusion is not None and layer.name in report.fusion.layers:
        half = report.fusion.layers[layer.name]
        kind = report.fusion.classes[layer.name]
        return ConversionRow(layer.name, source, kind, half, decision.reason)
    if decision.reason is not None:
        return ConversionRow(layer.name, source, None, None, decision.reason)
    if decision.norm is not None:
        replacement = engine.convert_norm(decision.norm, layer.name)
    else:
        replacement = _convert_linear(report, layer, engine)
    original = layer.module
    if layer.kind == "projection":
        original = getattr(_projected(report, layer), str(layer.part))
    report.replacements.append(take_over(layer.name, original, replacement))
    report.model = put_in_place(report.model, original, replacement)
    return ConversionRow(layer.name, source, type(replacement).__name__, None, None)


def _convert_linear(report: ConversionReport, layer: Layer, engine: Engine) -> nn.Module:
    if layer.attention is not None:
        attention = _projected(report, layer)
        if layer.kind == "projection":
            part = getattr(attention, str(layer.part)).part
            replacement = engine.convert_linear(part.as_linear(), layer.name)
            see_part(replacement, part)
            return replacement
    replacement = engine.convert_linear(as_linear(layer), layer.name)
    if is_conv1d(layer.module):
        weight = layer.module._parameters["weight"]
        assert weight is not None
        see_transposed(replacement, weight)
    return replacement


def _projected(report: ConversionReport, layer: Layer) -> nn.Module:
    """The module whose projections are layers; put into the model when first asked for."""
    attention = layer.attention
    assert attention is not None
    for item in report.replacements:
        if item.original is attention:
            return item.replacement
    encoders = encoders_around(report.model, attention)
    item = take_over(layer.name.rpartition(".")[0], attention, ProjectedAttention(attention))
    item.holds_layers, item.without_nesting = True, encoders
    report.replacements.append(item)
    report.model = put_in_place(report.model, attention, item.replacement)
    for encoder in encoders:
        encoder.use_nested_tensor = False
    return item.replacement


def _require_fp8_attention(engine: Engine, fusion: ModelFusion | None) -> None:
    """Raises where attention was to compute in FP8 and none of the model's does."""
    if not getattr(engine, "fp8_attention", False):
        return
    found = {} if fusion is None else fusion.fp8_attention
    reasons = Counter(found.values())
    if None in reasons:
        return
    why = "; ".join(f"{count} times: {reason}" for reason, count in reasons.most_common(3))
    raise SpecRefused(
        "no attention of this model can compute in FP8; "
        + (why or "no block of it is fused, or it has none"),
        pointer="/recipe/fp8_dpa",
    )
