"""The way back: the original modules, with the Parameters as they are now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from fp8core.conversion.replace import _rebind_load_hooks, put_in_place
from fp8core.conversion.report import ConversionReport, Replacement

__all__ = ["restore", "restore_layers"]


def restore(model: nn.Module, report: ConversionReport) -> nn.Module:
    """Put the original modules back into ``model``, which ``report`` is about; gives the model.

    The Parameters are those of the converted modules at this moment (trained, moved or assigned
    since), hooks and buffers too, wherever in the tree the converted module stands by now. The
    report's rows stay; its replacements are spent. Where ``report.model`` was itself replaced, what
    is returned is the original root.

    Raises ValueError, before anything is changed, where a converted module is not in ``model``.
    """
    present = {id(module) for module in model.modules()}
    lost = [r.name for r in report.replacements if id(r.replacement) not in present]
    if lost:
        raise ValueError(f"not in this model, so it cannot be restored: {', '.join(lost[:5])}")
    if report.fusion is not None:
        report.fusion.remove_all()
    for item in reversed(report.replacements):
        give_back(item)
        model = put_in_place(model, item.replacement, item.original)
    report.replacements.clear()
    report.model = model
    return model


def restore_layers(report: ConversionReport, reasons: Mapping[str, str]) -> None:
    """Put some of the original modules back into ``report.model``, by name and why.

    With a fused layer go all that it was fused with. As in ``restore`` the Parameters are those of
    this moment. The rows of these layers say from now on that they are kept, and the reason. Raises
    KeyError, before anything is changed, for a name that is not of a converted layer.
    """
    unknown = reasons.keys() - report.converted_layers().keys()
    if unknown:
        raise KeyError(f"not converted: {', '.join(sorted(unknown)[:5])}")
    reasons = dict(reasons)
    if report.fusion is not None:
        layers_of = report.fusion.remove(reasons)
        for name, half in layers_of.items():
            reasons.setdefault(name, f"it was fused in {half} with a layer that was put back")
    for item in [item for item in report.replacements if item.name in reasons]:
        give_back(item)
        report.model = put_in_place(report.model, item.replacement, item.original)
        report.replacements.remove(item)
    report.rows = [
        replace(row, to=None, group=None, reason=reasons[row.name]) if row.name in reasons else row
        for row in report.rows
    ]


def give_back(item: Replacement) -> None:
    """Move Parameters, buffers, mode and hooks from the replacement to the original object."""
    original, replacement = item.original, item.replacement
    for key in item.parameter_names:
        original._parameters[key] = replacement._parameters[key]
        replacement._parameters[key] = None
    for key in item.buffer_names:
        original._buffers[key] = replacement._buffers.pop(key)
    original.train(replacement.training)
    if original._backward_hooks:
        original._is_full_backward_hook = replacement._is_full_backward_hook
    for attribute, keys in item.own_hooks.items():
        for hook in keys:
            original.__dict__[attribute].pop(hook, None)
    _rebind_load_hooks(replacement, original)
    for encoder in item.without_nesting:
        encoder.use_nested_tensor = True
