"""An engine whose replacements are recognisable and compute the same in float32.

Conversion must be right for any engine that keeps to the protocol; this one takes what its shape
rule allows, converts norms too, and brings a hook and an FP8-like buffer of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8core.engines.protocol import NormDescription
from fp8core.spec import Conversion


class PlainLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.register_buffer("amax_history", torch.zeros(16), persistent=False)
        self.own_hook_calls = 0
        self.register_forward_pre_hook(self._count)

    @staticmethod
    def _count(module: Any, inputs: Any) -> None:
        module.own_hook_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class PlainNorm(nn.Module):
    def __init__(self, norm: NormDescription) -> None:
        super().__init__()
        self.norm = norm
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        over = tuple(range(-len(self.norm.normalized_shape), 0))
        y = x.float()
        if self.norm.kind == "layer_norm":
            y = y - y.mean(over, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(over, keepdim=True) + self.norm.eps)
        if self.weight is not None:
            y = y * (self.weight + 1.0 if self.norm.zero_centered else self.weight)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class PlainEngine:
    name = "plain"
    recipe = None
    device = torch.device("cpu")
    token_multiple = 16
    compute_dtype = torch.float32
    gradient_scaler = None

    def __init__(self, fails_at: str | None = None) -> None:
        self.fails_at = fails_at

    def linear_refusal(self, linear: nn.Linear) -> str | None:
        for side in ("in_features", "out_features"):
            if getattr(linear, side) % 16:
                return f"{side} {getattr(linear, side)} is not a multiple of 16"
        return None

    def norm_refusal(self, norm: NormDescription) -> str | None:
        return None if norm.weight is not None else "it has no weight"

    def convert_linear(self, linear: nn.Linear, name: str) -> nn.Module:
        if name == self.fails_at:
            raise ArithmeticError("no")
        return PlainLinear(linear)

    def convert_norm(self, norm: NormDescription, name: str) -> nn.Module:
        return PlainNorm(norm)

    def prepare(self, model: nn.Module) -> None:
        return

    def checkpoint_function(self) -> None:
        return None

    def training_context(self, first_microbatch: bool | None = None) -> Any:
        return nullcontext()

    evaluation_context = training_context

    def after_backward(self) -> None:
        return

    def metrics(self) -> dict[str, float]:
        return {}

    def record_health(self, enabled: bool) -> None:
        return

    health = metrics

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        return


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine()


@pytest.fixture
def make_engine() -> Callable[..., PlainEngine]:
    return PlainEngine


@pytest.fixture
def conversion() -> Callable[..., Conversion]:
    return lambda **fields: Conversion(**fields)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
