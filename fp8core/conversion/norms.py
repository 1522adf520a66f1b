"""What a normalisation layer computes, found by its structure and proved by running it.

Libraries have dozens of RMSNorm and LayerNorm classes that compute the same thing under different
names, and a few that look alike and do not. A class is therefore never trusted by its name: a copy
of the module with known random weights is run on a few known rows on the CPU and compared with the
formulas in float64. Only a module that agrees with one of them is described.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.engines.protocol import NormDescription

__all__ = ["HOOK_ATTRIBUTES", "describe_norm", "is_norm"]

HOOK_ATTRIBUTES = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The ordered dicts in which ``nn.Module`` keeps hooks."""

_NORM_NAME = re.compile(r"(LayerNorm|RMSNorm|L2Norm)|Norm(Gated|\d?d)?$")
_EPS_ATTRIBUTES = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps")
_TORCH_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.modules.batchnorm._NormBase,
)
# Single precision against float64: the sums of a row of 10^4 elements differ by well under this.
_RELATIVE_TOLERANCE = 1e-4


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a normalisation layer of any kind (a leaf; by class or class name)."""
    if isinstance(module, _TORCH_NORMS):
        return True
    return (
        _NORM_NAME.search(type(module).__name__) is not None
        and next(module.children(), None) is None
    )


def describe_norm(module: nn.Module) -> NormDescription | str:
    """``module`` by what it computes, or, as a text, why it is neither LayerNorm nor RMSNorm.

    The description's ``weight`` and ``bias`` are the module's own Parameters, on whatever device
    (``meta`` too): the check runs on a copy with weights of its own.
    """
    name = type(module).__name__
    if isinstance(module, _TORCH_NORMS) and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return f"{name} normalises over other dimensions than LayerNorm and RMSNorm do"
    parameters = dict(module.named_parameters(recurse=False))
    foreign = sorted(parameters.keys() - {"weight", "bias"})
    if foreign:
        return f"{name} has parameters that LayerNorm and RMSNorm do not have: {', '.join(foreign)}"
    reason = _signature_refusal(module)
    if reason is not None:
        return reason
    shape = _normalized_shape(module)
    if shape is None:
        return f"{name} does not say over which dimensions it normalises"
    eps = _eps(module)
    if isinstance(eps, str):
        return eps
    weight, bias = parameters.get("weight"), parameters.get("bias")
    for parameter in (weight, bias):
        if parameter is not None and tuple(parameter.shape) != shape:
            return f"{name} has a parameter of another shape than the one it normalises over"
    return _recognise(module, shape, eps, weight, bias)


def _signature_refusal(module: nn.Module) -> str | None:
    """A forward with further inputs (a gate, a condition) does more than a norm."""
    try:
        inputs = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return f"{type(module).__name__}.forward cannot be inspected"
    if len(inputs) != 1 or inputs[0].kind in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    ):
        return f"{type(module).__name__}.forward takes more than one tensor"
    return None


def _normalized_shape(module: nn.Module) -> tuple[int, ...] | None:
    declared = getattr(module, "normalized_shape", None)
    if isinstance(declared, int):
        return (declared,)
    if isinstance(declared, (tuple, list, torch.Size)) and all(
        isinstance(n, int) for n in declared
    ):
        return tuple(declared)
    weight = module._parameters.get("weight")
    return tuple(weight.shape) if weight is not None and weight.dim() > 0 else None


def _eps(module: nn.Module) -> float | str:
    for attribute in _EPS_ATTRIBUTES:
        if hasattr(module, attribute):
            value = getattr(module, attribute)
            if value is None:
                return "its eps is None, which means the machine epsilon of whatever dtype comes in"
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
                return float(value)
    return f"{type(module).__name__} has no eps that can be read"


def _recognise(
    module: nn.Module,
    shape: tuple[int, ...],
    eps: float,
    weight: nn.Parameter | None,
    bias: nn.Parameter | None,
) -> NormDescription | str:
    name = type(module).__name__
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows = _probe_rows(shape, generator)
    probe_weight = (
        None
        if weight is None
        else torch.empty(shape, device="cpu").uniform_(0.5, 1.5, generator=generator)
    )
    probe_bias = (
        None
        if bias is None
        else torch.empty(shape, device="cpu").uniform_(-1.0, 1.0, generator=generator)
    )
    try:
        with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
            output = _bare_copy(module, probe_weight, probe_bias)(rows)
    except Exception as error:
        return f"{name} could not be checked on the CPU: {type(error).__name__}: {error}"
    if not isinstance(output, Tensor) or output.shape != rows.shape:
        return f"{name} does not return a tensor of its input's shape"
    for kind in ("layer_norm", "rms_norm"):
        for zero_centered in (False, True) if weight is not None else (False,):
            expected = _reference(
                kind, rows, len(shape), eps, probe_weight, probe_bias, zero_centered
            )
            if _agrees(output, expected):
                return NormDescription(
                    kind=kind,
                    normalized_shape=shape,
                    eps=eps,
                    weight=weight,
                    bias=bias,
                    zero_centered=zero_centered,
                )
    return f"{name} computes neither LayerNorm nor RMSNorm (its output was compared with both)"


def _probe_rows(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Rows [5, *shape] that tell eps, mean and scale apart: plain, large, tiny, shifted, zero."""
    rows = torch.randn((5, *shape), generator=generator, device="cpu")
    factors = torch.tensor([1.0, 30.0, 1e-3, 1.0, 0.0], device="cpu")
    shifts = torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0], device="cpu")
    view = (5,) + (1,) * len(shape)
    return rows * factors.view(view) + shifts.view(view)


def _bare_copy(module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> nn.Module:
    """A copy that shares no Parameter and runs no hook, with the given CPU weights."""
    bare = copy.copy(module)
    parameters: dict[str, nn.Parameter | None] = dict.fromkeys(module._parameters)
    for key, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            parameters[key] = nn.Parameter(value, requires_grad=False)
    state: dict[str, Any] = bare.__dict__
    state["_parameters"] = parameters
    for attribute in HOOK_ATTRIBUTES:
        state[attribute] = OrderedDict()
    return bare


def _reference(
    kind: str,
    rows: Tensor,
    dimensions: int,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    zero_centered: bool,
) -> Tensor:
    """The formulas of ``NormDescription`` in float64."""
    x = rows.double()
    over = tuple(range(-dimensions, 0))
    if kind == "layer_norm":
        x = x - x.mean(over, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(over, keepdim=True) + eps)
    if weight is not None:
        x = x * (weight.double() + (1.0 if zero_centered else 0.0))
    return x if bias is None else x + bias.double()


def _agrees(output: Tensor, expected: Tensor) -> bool:
    # Row by row: an error in the tiny row must not hide behind the size of the large one.
    for row, reference in zip(output.double(), expected, strict=True):
        limit = _RELATIVE_TOLERANCE * max(float(reference.abs().max()), 1e-6)
        difference = float((row - reference).abs().max())
        if not math.isfinite(difference) or difference > limit:
            return False
    return True
