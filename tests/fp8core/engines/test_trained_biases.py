"""Biases that are trained beside frozen weights, in the layers of te, on a CPU.

Transformer Engine is a stand-in with its rule: where a weight needs no gradient, a bias that the
GEMM was given has none.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8core.conversion.weight_views import plain_linear, see_transposed
from fp8core.engines import te_modules
from fp8core.engines.te_modules import make_linear
from fp8core.engines.te_override import OverrideLinear
from fp8core.engines.weight_casts import WeightCasts
from fp8core.fusion import fuse, high_precision, te_parts
from fp8core.fusion.high_precision import JoinedLinear, NormLinear, NormMLP
from fp8core.fusion.parts import MLPHalf, NamedLinear
from fp8core.fusion.plain import PlainParts, plain_norm
from fp8core.fusion.te_parts import TEParts
from tests.fp8core.fusion.families import make


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        rows = gradient.flatten(0, -2)
        if not ctx.needs_input_grad[1]:
            return gradient @ weight, None, None
        return gradient @ weight, rows.t() @ x.flatten(0, -2), rows.sum(0)


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = _Gemm.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return product


class Module(nn.Module):
    """What is common to Transformer Engine's: what the GEMM gets, and what is added behind it."""

    def __init__(self, *sizes: int, bias: bool, **options: Any) -> None:
        super().__init__()
        self.name, self.fp8, self.use_bias = options["name"], False, bias
        self.gemm_bias_unfused_add = False
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        self.options = options

    def _get_weight_tensors(self) -> list[Tensor]:
        return [self.weight]

    def _get_weight_quantizers(self) -> list[Any]:
        return []

    def _in_and_behind(self, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return (None, bias) if self.gemm_bias_unfused_add else (bias, None)

    def _last(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        inside, behind = self._in_and_behind(bias)
        output = gemm(x, weight, inside)
        return output if behind is None else output + behind


class Linear(Module):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.register_parameter("weight", nn.Parameter(torch.empty(0)))
        self.bias = nn.Parameter(torch.empty(0)) if self.use_bias else torch.empty(0)

    def _joined_bias(self) -> Tensor | None:
        if not self.use_bias:
            return None
        return torch.cat([getattr(self, name) for name in self.bias_names])

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._last(x, self._get_weight_tensors()[0], self._joined_bias())


class LayerNormMLP(Module):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.register_parameter("fc1_weight", nn.Parameter(torch.empty(0)))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = F.layer_norm(
            x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.options["eps"]
        )
        first, second = self._get_weight_tensors()
        inner = F.gelu(F.linear(normed, first, self.fc1_bias), approximate="tanh")
        return self._last(inner, second, self.fc2_bias)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = "transformer_engine"
    names = ("", ".pytorch", ".pytorch.attention", ".pytorch.attention.rope")
    more = (".pytorch.cpp_extensions", ".pytorch.quantized_tensor")
    modules: dict[str, Any] = {name: ModuleType(root + name) for name in (*names, *more)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, root + name, module)
        if name:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, module)
    modules[".pytorch"].Linear = Linear
    modules[".pytorch"].LayerNormMLP = LayerNormMLP
    modules[".pytorch.attention.rope"].apply_rotary_pos_emb = None
    modules[".pytorch.cpp_extensions"].general_gemm = general_gemm
    tensors = modules[".pytorch.quantized_tensor"]
    tensors.prepare_for_saving = lambda *given: (given, None)
    tensors.restore_from_func_ctx = lambda ctx: ctx.saved_tensors
    monkeypatch.setattr(high_precision, "normalise", lambda x, norm, dtype: plain_norm(x, norm))
    monkeypatch.setattr(high_precision, "raise_unless_taken", lambda norm: None)
    classes = (te_modules._class, te_parts._class)
    for made in classes:
        made.cache_clear()
    yield
    for made in classes:
        made.cache_clear()


def freeze(layers: list[nn.Module], trained: str) -> dict[str, nn.Parameter]:
    """All but biases, or all but weights; the Parameters that are trained."""
    found = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_((name == "bias") == (trained == "biases"))
            if parameter.requires_grad:
                found[f"{index}.{name}"] = parameter
    return found


def assert_gradients(found: Tensor, expected: Tensor, trained: dict[str, nn.Parameter]) -> None:
    """Of ``found`` those that ``expected``, computed by PyTorch of the same Parameters, has."""
    assert trained
    along = torch.randn(found.shape)
    assert torch.allclose(found, expected, atol=1e-5)
    given, asked = (
        torch.autograd.grad((output * along).sum(), list(trained.values()), allow_unused=True)
        for output in (found, expected)
    )
    for name, own, other in zip(trained, given, asked, strict=True):
        assert own is not None, name
        assert other is not None
        assert torch.allclose(own, other, atol=1e-4), name


def parts() -> TEParts:
    def no_linear(linear: nn.Linear, name: str) -> nn.Module:
        raise AssertionError(name)

    return TEParts(
        lambda name, module, gemms: None, list, no_linear, WeightCasts(), torch.float32, None
    )


def mlp_half() -> MLPHalf:
    block = fuse(make("GPT2"), PlainParts(), {}).blocks[0]
    assert block.mlp is not None
    return block.mlp.half


def joined_linears() -> list[NamedLinear]:
    return [NamedLinear(f"{name}_proj", nn.Linear(16, 8)) for name in "qkv"]


TRAINED = pytest.mark.parametrize("trained", ["biases", "weights"])


@TRAINED
def test_a_linear(trained: str) -> None:
    linear, x = nn.Linear(16, 8), torch.randn(2, 3, 16)
    parameters = freeze([linear], trained)
    layer = make_linear(linear, "a", WeightCasts())
    assert_gradients(layer(x), linear(x), parameters)


@TRAINED
def test_a_linear_whose_weight_is_kept_transposed(trained: str) -> None:
    weight, bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8))
    weight.requires_grad_(trained == "weights")
    bias.requires_grad_(trained == "biases")
    layer = make_linear(plain_linear(weight.t(), bias), "a", WeightCasts())
    see_transposed(layer, weight)
    x = torch.randn(3, 16)
    parameters = {trained: bias if trained == "biases" else weight}
    assert_gradients(layer(x), F.linear(x, weight.t(), bias), parameters)
    with torch.no_grad():  # where a view of a trained weight asks for no gradient
        layer(x)
    assert not layer.gemm_bias_unfused_add


@TRAINED
def test_several_linears_as_one(trained: str) -> None:
    linears, x = joined_linears(), torch.randn(2, 3, 16)
    parameters = freeze([linear.module for linear in linears], trained)
    layer = parts().linears(linears, "qkv")
    expected = torch.cat([linear.module(x) for linear in linears], -1)
    assert_gradients(layer(x), expected, parameters)


def test_one_trained_weight_of_several_takes_the_biases_along() -> None:
    linears, x = joined_linears(), torch.randn(2, 3, 16)
    modules = [linear.module for linear in linears]
    parameters = freeze(modules, "biases")
    parameters["2.weight"] = linears[2].parameter.requires_grad_()
    layer: Any = parts().linears(linears, "qkv")
    assert_gradients(layer(x), torch.cat([module(x) for module in modules], -1), parameters)
    assert not layer.gemm_bias_unfused_add


@TRAINED
@pytest.mark.parametrize("alone", ["both", "first", "last"])
def test_an_mlp_in_one_module(trained: str, alone: str) -> None:
    half = mlp_half()
    inputs, down = [linear.module for linear in half.inputs], [half.down.module]
    chosen = {"both": [*inputs, *down], "first": inputs, "last": down}[alone]
    for parameter in (p for layer in (*inputs, *down) for p in layer.parameters()):
        parameter.requires_grad_(False)
    parameters = freeze(chosen, trained)
    x = torch.randn(2, 3, inputs[0].weight.shape[0], requires_grad=True)
    layer = parts().norm_mlp(half)
    assert_gradients(layer(x), PlainParts().norm_mlp(half)(x), parameters)


@TRAINED
def test_blocks_without_fp8(trained: str) -> None:
    half = mlp_half()
    linears = joined_linears()
    layers = [linear.module for linear in (*half.inputs, half.down, *linears)]
    parameters = freeze(layers, trained)
    narrow, wide = torch.randn(2, 3, 16), torch.randn(2, 3, half.inputs[0].in_features)
    plain = PlainParts()
    for own, other, x, count in (
        (JoinedLinear(linears), plain.linears(linears, "qkv"), narrow, slice(-3, None)),
        (
            NormLinear(half.norm, half.inputs, torch.float32),
            plain.norm_linear(half.norm, half.inputs, "up"),
            wide,
            slice(0, 1),
        ),
        (NormMLP(half, torch.float32), plain.norm_mlp(half), wide, slice(0, 2)),
    ):
        of_it = dict(list(parameters.items())[count])
        assert_gradients(own(x), other(x), of_it)


class Uncast:
    """The quantizer of a cast that changes nothing."""

    def set_usage(self, **usage: bool) -> None:
        """Both copies are the tensor itself."""

    def __call__(self, tensor: Tensor) -> Any:
        held: Any = tensor.detach().view_as(tensor)
        held.update_usage = self.set_usage
        return held


def general_gemm(
    first: Tensor,
    second: Tensor,
    *,
    layout: str,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor]:
    """Transformer Engine's, whose matrices lie the other way round."""
    if layout == "TN":
        return (F.linear(second, first, bias),)
    return (second @ first if layout == "NN" else second.t() @ first,)


@TRAINED
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("override", list(itertools.product([False, True], repeat=3))[:-1])
def test_gemms_that_are_chosen_one_by_one(
    override: tuple[bool, bool, bool], enabled: bool, trained: str
) -> None:
    linear, x = nn.Linear(16, 8), torch.randn(2, 3, 16)
    parameters = freeze([linear], trained)
    layer = OverrideLinear(
        linear.weight, linear.bias, override, lambda tensor: Uncast(), lambda: enabled
    )
    assert_gradients(layer(x), linear(x), parameters)
