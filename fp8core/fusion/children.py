"""What the children of a block compute: linear layers, norms and activations, or why none of them.

Nothing is believed of a name: norms and activations are proved on numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8core.conversion.find import is_conv1d
from fp8core.conversion.norms import describe_norm
from fp8core.engines.protocol import NormDescription
from fp8core.fusion.layouts import PassedBy
from fp8core.fusion.parts import NamedLinear

__all__ = ["Function", "activation", "described_norm", "hooked", "linears"]

Function = Literal["silu", "gelu_tanh", "gelu"]
"""The last is GELU itself, by the error function."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooked(name: str, block: nn.Module, passed_by: PassedBy) -> str | None:
    """Why hooks would not be called, where modules of ``block`` (called ``name``) are not."""
    for path in passed_by.paths(block):
        module = block.get_submodule(path)
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"{name}.{path} has hooks, which would not be called"
    return None


def linears(path: str, parent: Any, names: tuple[str, ...]) -> tuple[NamedLinear, ...] | str:
    found = []
    for name in names:
        module = parent._modules.get(name)
        if module is None:
            return f"{path} has no {name}"
        if type(module) is not nn.Linear and not is_conv1d(module):
            return f"{path}.{name} is a {type(module).__name__}, not a plain Linear"
        found.append(NamedLinear(f"{path}.{name}", module))
    return tuple(found)


def described_norm(name: str, module: nn.Module) -> NormDescription | str:
    norm = describe_norm(module)
    if isinstance(norm, str):
        return f"{name}: {norm}"
    if norm.weight is None:
        return f"{name} has no weight"
    return norm


def activation(function: Any) -> Function | None:
    """What ``function`` computes, proved on numbers in float64; None: none of those."""
    if not callable(function):
        return None
    points = torch.linspace(-12.0, 12.0, 769, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            values = function(points)
    # An activation may be any callable, and fail in any way.
    except Exception:
        return None
    references: dict[Function, Tensor] = {
        "silu": nn.functional.silu(points),
        "gelu_tanh": nn.functional.gelu(points, approximate="tanh"),
        "gelu": nn.functional.gelu(points),
    }
    for found, reference in references.items():
        if isinstance(values, Tensor) and torch.allclose(values, reference, rtol=1e-9, atol=1e-12):
            return found
    return None
