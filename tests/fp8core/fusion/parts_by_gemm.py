"""Parts of blocks that compute GEMM by GEMM, as te does beside overrides, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core.engines.protocol import NormDescription
from fp8core.engines.te_override import JoinedOverrideLinear, OverrideLinear
from fp8core.fusion import high_precision
from fp8core.fusion.parts import Kernel, NamedLinear, NormedKernel
from fp8core.fusion.plain import PlainParts, plain_norm
from fp8core.fusion.te_backward import BackwardParts
from fp8core.fusion.te_overridden import OverriddenParts

__all__ = ["Chosen", "InSteps", "norms_of_a_cpu"]

WGRAD_HIGH = (False, False, True)


class Chosen(PlainParts):
    """The GEMMs of `OverriddenParts`, told that FP8 is off, between what needs no GPU."""

    kinds = OverriddenParts.kinds
    mlp_in_one = OverriddenParts.mlp_in_one
    norm_linear = OverriddenParts.norm_linear
    norm_linear_and_norm = OverriddenParts.norm_linear_and_norm
    linears = OverriddenParts.linears
    linear = OverriddenParts.linear
    norm_mlp = OverriddenParts.norm_mlp
    norm_mlp_and_norm = OverriddenParts.norm_mlp_and_norm
    _dtype = torch.float32

    def __init__(self) -> None:
        self.made: dict[str, nn.Module] = {}

    def _make_gemms(
        self, name: str, weights: Callable[[], tuple[Tensor, Tensor | None]]
    ) -> nn.Module:
        layer = JoinedOverrideLinear(weights, WGRAD_HIGH, _no_quantizer, lambda: False)
        self.made[name] = layer
        return layer

    def _convert_linear(self, linear: nn.Linear, name: str) -> nn.Module:
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        assert weight is not None
        layer = OverrideLinear(weight, bias, WGRAD_HIGH, _no_quantizer, lambda: False)
        self.made[name] = layer
        return layer

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.made.pop(name, None)


def _no_quantizer(tensor: str) -> Any:
    raise AssertionError("nothing is cast where FP8 is off")


class InSteps(PlainParts):
    """What `BackwardParts` asks of a block, in PyTorch's operations; each GEMM by its name."""

    kinds = BackwardParts.kinds
    mlp_in_one = BackwardParts.mlp_in_one
    norm_mlp = BackwardParts.norm_mlp
    norm_mlp_and_norm = BackwardParts.norm_mlp_and_norm

    def __init__(self) -> None:
        self.made: list[str] = []

    def norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> Kernel:
        self.made.append(name)
        return super().norm_linear(norm, linears, name)

    def norm_linear_and_norm(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> NormedKernel:
        self.made.append(name)
        return super().norm_linear_and_norm(norm, linears, name)

    def linears(self, linears: Sequence[NamedLinear], name: str) -> Kernel:
        self.made.append(name)
        return super().linears(linears, name)

    def linear(self, linear: NamedLinear) -> Kernel:
        self.made.append(linear.name)
        return super().linear(linear)


@pytest.fixture(autouse=True)
def norms_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of norms need Triton."""
    monkeypatch.setattr(high_precision, "normalise", lambda x, norm, dtype: plain_norm(x, norm))
    monkeypatch.setattr(high_precision, "raise_unless_taken", lambda norm: None)
