"""Faults planted in the parts of fused blocks: the proof before use must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8core.engines.protocol import NormDescription
from fp8core.fusion import fuse
from fp8core.fusion.parts import Attend, AttentionHalf, Kernel, MLPHalf, NamedLinear, joined
from fp8core.fusion.plain import PlainParts, plain_norm
from fp8core.fusion.sequences import Sequences
from tests.fp8core.fusion.families import make

FUSED, REFUSED = {"self_attn", "mlp"}, {"mlp"}


class OtherAttention(PlainParts):
    """Attention with other heads, sequences or windows than it is given."""

    def __init__(
        self,
        heads: Callable[[Tensor, int], Tensor] = lambda part, times: part,
        sequences: Callable[[Sequences], Sequences] = lambda sequences: sequences,
        window: Callable[[int | None], int | None] = lambda window: window,
        scale: float = 1.0,
    ) -> None:
        self._heads, self._sequences = heads, sequences
        self._window, self._scale = window, scale

    def attention(self, half: AttentionHalf) -> Attend:
        times = half.heads // half.kv_heads
        changed = replace(half, window=self._window(half.window), scale=half.scale * self._scale)
        own = super().attention(changed)

        def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
            key, value = (self._heads(part, times) for part in (key, value))
            return own(query, key, value, self._sequences(sequences))

        return attend


class OtherRotation(PlainParts):
    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        self._turn = turn

    def rotate(self, heads: Tensor, angles: Tensor, sequences: Sequences) -> Tensor:
        turned = angles[sequences.positions(heads.device)][:, :, None, :]
        rotated = self._turn(heads.float())
        return (heads * turned.cos() + rotated * turned.sin()).to(heads.dtype)


class NoHeadNorms(PlainParts):
    def head_norm(self, half: AttentionHalf, name: str) -> Kernel:
        return lambda heads: heads


class NoBiases(PlainParts):
    """``where``: of q, k and v, or of o."""

    def __init__(self, where: str) -> None:
        self._where = where

    def norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> Kernel:
        own = super().norm_linear(norm, linears, name)
        if self._where != "qkv":
            return own
        bias = torch.cat([linear.bias for linear in linears if linear.bias is not None])
        return lambda x: own(x) - bias

    def linear(self, linear: NamedLinear) -> Kernel:
        if self._where != "o":
            return super().linear(linear)
        return lambda x: F.linear(x, linear.weight)


class OtherNorm(PlainParts):
    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def norm_linear(
        self, norm: NormDescription, linears: Sequence[NamedLinear], name: str
    ) -> Kernel:
        return super().norm_linear(replace(norm, **self._changes), linears, name)


class WrongGradient(PlainParts):
    """Right outputs of MLPs, and a gradient that is too large by a fifth."""

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        own = super().norm_mlp(half)

        def kernel(x: Tensor) -> Tensor:
            output = own(x)
            return output + 0.2 * (output - output.detach())

        return kernel


def tiled(part: Tensor, times: int) -> Tensor:
    """Heads of k and v one after another, where each belongs to ``times`` neighbours of q."""
    return part.repeat(1, 1, times, 1)


def whole_rows(sequences: Sequences) -> Sequences:
    return Sequences(sequences.rows, sequences.length)


def other_half(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def neighbours(heads: Tensor) -> Tensor:
    return torch.stack((-heads[..., 1::2], heads[..., ::2]), dim=-1).flatten(-2)


def fused_halves(model: Any, parts: PlainParts) -> tuple[list[set[str]], list[str | None]]:
    rows = fuse(model, parts, {}).rows
    halves = [{half.rpartition(".")[2] for half in row.fused} for row in rows]
    return halves, [row.reason for row in rows]


FAULTS: Mapping[str, tuple[str, Callable[[], PlainParts], dict[str, Any]]] = {
    "rotated by the other half": ("Llama", lambda: OtherRotation(other_half), {}),
    "rotated by neighbours": ("Llama", lambda: OtherRotation(neighbours), {}),
    "heads tiled": ("Llama", lambda: OtherAttention(heads=tiled), {}),
    "documents ignored": ("Llama", lambda: OtherAttention(sequences=whole_rows), {}),
    "scores scaled": ("Llama", lambda: OtherAttention(scale=1.2), {}),
    "no norms of q and k": ("Qwen3", NoHeadNorms, {}),
    "no biases of q, k and v": ("Qwen2", lambda: NoBiases("qkv"), {}),
    "no bias of o": ("Llama, with biases", lambda: NoBiases("o"), {}),
    "zero-centred weights": ("Llama", lambda: OtherNorm(zero_centered=True), {}),
    "weights not zero-centred": ("Gemma", lambda: OtherNorm(zero_centered=False), {}),
    "another epsilon": ("Llama", lambda: OtherNorm(eps=1e-5), {"rms_norm_eps": 1e-6}),
    "window a token wide of it": (
        "Mistral",
        lambda: OtherAttention(window=lambda window: (window or 0) + 1),
        {},
    ),
    "window ignored": ("Mistral", lambda: OtherAttention(window=lambda window: None), {}),
    "a window beyond the rows ignored": (
        "Mistral",
        lambda: OtherAttention(window=lambda window: None),
        {"sliding_window": 4096},
    ),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_in_attention_is_found(fault: str, dtype: torch.dtype, trained: bool) -> None:
    family, parts, changes = FAULTS[fault]
    model = make(family, **changes).to(dtype)
    if not trained:
        as_initialised(model)
    assert fused_halves(model, PlainParts()) == ([FUSED, FUSED], [None, None])
    model = make(family, **changes).to(dtype)
    if not trained:
        as_initialised(model)
    halves, reasons = fused_halves(model, parts())
    assert halves == [REFUSED, REFUSED]
    assert all("of its fused form differs by" in str(reason) for reason in reasons)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_alone_that_is_wrong_is_found(dtype: torch.dtype) -> None:
    halves, reasons = fused_halves(make("Llama").to(dtype), WrongGradient())
    assert halves == [{"self_attn"}] * 2
    assert all(str(reason).startswith("the gradient of") for reason in reasons)


def test_numbers_of_64_bits_are_compared_too() -> None:
    assert fused_halves(make("Llama").double(), PlainParts()) == ([FUSED, FUSED], [None, None])
    halves, reasons = fused_halves(make("Llama").double(), OtherNorm(eps=1.01e-6))
    assert halves == [REFUSED, REFUSED]
    assert all("(bound 1e-05)" in str(reason) for reason in reasons)


class NoisyAttention(PlainParts):
    """Whose first outputs are off by 10 %, ``times`` of them."""

    def __init__(self, times: int) -> None:
        self._left = times

    def attention(self, half: AttentionHalf) -> Attend:
        own = super().attention(half)

        def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
            self._left -= 1
            return own(query, key, value, sequences) * (1.1 if self._left >= 0 else 1.0)

        return attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_differs_with_some_inputs_only_is_no_fault(dtype: torch.dtype) -> None:
    """Of each draw the fused form is computed thrice, for the gradients of an MLP in one module."""
    halves, _ = fused_halves(make("Llama").to(dtype), NoisyAttention(6))
    assert halves == [FUSED, FUSED]
    halves, _ = fused_halves(make("Llama").to(dtype), NoisyAttention(9))
    assert halves[0] != FUSED


class BiasesWithWeights(PlainParts):
    """An MLP in one module whose last bias has no gradient where its weight has none."""

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        def kernel(x: Tensor) -> Tensor:
            inner = F.linear(plain_norm(x, half.norm), *joined(half.inputs))
            added: Tensor = _Added.apply(  # type: ignore[no-untyped-call]
                F.linear(self.active(inner, half.activation), half.down.weight),
                half.down.bias,
                half.down.parameter.requires_grad,
            )
            return added

        return kernel


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, told: bool) -> Tensor:
        ctx.told = told
        return x + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0].flatten(0, -2).sum(0) if ctx.told else None, None


@pytest.mark.parametrize("trained", [True, False])
def test_a_bias_that_its_module_forgets_beside_a_frozen_weight(trained: bool) -> None:
    """As Transformer Engine's do. Where the weight is trained nothing is amiss."""
    model = make("GPT2")
    for block in model.transformer.h:
        block.mlp.c_proj.weight.requires_grad_(trained)
    halves, reasons = fused_halves(model, BiasesWithWeights())
    if trained:
        assert (halves, reasons) == ([{"attn", "mlp"}] * 2, [None, None])
    else:
        assert halves == [{"attn"}] * 2
        told = "the gradient of mlp.c_proj.bias of its fused form differs by inf"
        assert all(str(reason).startswith(told) for reason in reasons)


def test_a_window_beyond_the_rows_is_proved_narrower_and_used_as_it_is() -> None:
    model = make("Mistral", sliding_window=4096)
    fusion = fuse(model, PlainParts(), {})
    assert [row.reason for row in fusion.rows] == [None, None]
    for block in fusion.blocks:
        assert block.attention is not None
        assert block.attention.half.window == 4096


def test_a_gated_mlp_with_biases_is_left_as_it_is() -> None:
    halves, reasons = fused_halves(make("Llama", mlp_bias=True), PlainParts())
    assert halves == [{"self_attn"}] * 2
    assert all(str(reason).endswith(".mlp has biases") for reason in reasons)


def dropping(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


def capped(model: Any) -> None:
    model.config.attn_logit_softcapping = 50.0


def with_sinks(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(4))


def looking_ahead(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dropping, "drops attention weights out"),
        (capped, "changes the scores before or in the softmax"),
        (with_sinks, "changes the scores before or in the softmax"),
        (looking_ahead, "is not causal"),
    ],
)
def test_other_attention_is_left_as_it_is(change: Callable[[Any], None], reason: str) -> None:
    model = make("Llama")
    change(model)
    halves, reasons = fused_halves(model, PlainParts())
    assert halves == [REFUSED, REFUSED]
    assert all(str(said).endswith(f".self_attn {reason}") for said in reasons)


def as_initialised(model: Any) -> None:
    """Small weights, no biases, norms that change nothing: a model before its first step."""
    zero_centred = type(model).__name__.startswith("Gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.02 / 0.15)
            else:
                plain = 0.0 if name.endswith("bias") or zero_centred else 1.0
                parameter.fill_(plain)
