"""What the te engine decides by itself, without a GPU: kept casts, recomputation, the interval of
scales, which operands an override casts, infinities."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8core.engines.te_modules import as_gemms_read_them
from fp8core.engines.te_override import OperandUse
from fp8core.engines.te_recompute import FirstRun, Recomputation
from fp8core.engines.te_state import DirectionState, ForwardScales, ScaleInterval, infinities
from fp8core.engines.weight_casts import WeightCasts
from fp8core.numerics.float8_weight import cast_weight


def state(scale: float, *history: float) -> DirectionState:
    rows = torch.tensor(history or (0.0,)).reshape(-1, 1).repeat(1, 3)
    return DirectionState(torch.full((3,), scale), rows)


# Weights for GEMMs that take no strides


def test_a_transposed_weight_is_laid_out_in_rows_and_its_gradient_reaches_the_parameter() -> None:
    kept, plain = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(4, 3))
    turned, same = as_gemms_read_them([kept.t(), plain], in_fp8=False)
    assert same is plain
    assert turned.stride() == (3, 1)
    assert torch.equal(turned, kept.t())
    along = torch.randn(5, 3)
    (turned * along).sum().backward()
    assert kept.grad is not None
    assert torch.equal(kept.grad, along.t())


@pytest.mark.parametrize("in_fp8", [True, False])
def test_a_weight_that_is_read_beside_its_cast_is_in_that_dtype(in_fp8: bool) -> None:
    """Without a GEMM of bf16 with fp32, and of a transposed weight too."""
    kept, plain = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(4, 3).bfloat16())
    turned, same = as_gemms_read_them([kept.t(), plain], in_fp8=in_fp8, dtype=torch.bfloat16)
    assert same is plain
    assert (turned.dtype, turned.stride()) == (torch.bfloat16, (3, 1))
    assert torch.equal(turned, kept.t().bfloat16())
    along = torch.randn(5, 3).bfloat16()
    (turned * along).sum().backward()
    assert kept.grad is not None
    assert torch.equal(kept.grad, along.t().float())


def test_a_weight_in_fp8_is_given_to_fp8_gemms_as_it_lies_and_to_others_as_its_values() -> None:
    (stored,) = cast_weight([torch.randn(32, 16)])
    (given,) = as_gemms_read_them([stored], in_fp8=True)
    assert given is stored
    (values,) = as_gemms_read_them([stored], in_fp8=False)
    assert type(values) is torch.Tensor
    assert torch.equal(values, stored.dequantize())
    (turned,) = as_gemms_read_them([stored.t()], in_fp8=False)
    assert turned.is_contiguous()
    assert torch.equal(turned, stored.dequantize().t())


# Kept casts of weights


def test_no_cast_of_a_weight_in_fp8_is_kept() -> None:
    casts, weight = WeightCasts(), nn.Parameter(torch.ones(16, 16), requires_grad=False)
    (stored,) = cast_weight([weight])
    for micro_batch in range(3):
        casts.begin(micro_batch == 0)
        assert casts.is_first("a", stored) is None
        assert casts.is_first("b", weight, stored) is None
        assert casts.is_first("c", weight) is (micro_batch == 0)
    assert not casts.reuses("a", stored)


def test_a_cast_is_made_in_the_first_micro_batch_and_kept_for_the_others() -> None:
    casts, weight = WeightCasts(), nn.Parameter(torch.ones(2))
    for _ in range(2):  # optimizer steps
        asked = []
        for micro_batch in range(3):
            casts.begin(micro_batch == 0)
            asked.append(casts.is_first("a", weight))
        assert asked == [True, False, False]
        with torch.no_grad():
            weight.add_(1.0)


def test_without_accumulation_nothing_is_kept() -> None:
    casts, weight = WeightCasts(), nn.Parameter(torch.ones(2))
    assert casts.is_first("a", weight) is None
    casts.begin(True)
    assert casts.is_first("a", weight) is True
    casts.begin(None)
    assert casts.is_first("a", weight) is None
    assert not casts.reuses("a", weight)


def test_a_layer_that_the_first_micro_batch_skipped_gets_no_cast_of_an_earlier_step() -> None:
    casts, weight = WeightCasts(), nn.Parameter(torch.ones(2))
    casts.begin(True)
    assert casts.is_first("expert", weight) is True
    weight.data = torch.zeros(2)  # an optimizer that writes past autograd's counter
    casts.begin(True)
    casts.begin(False)
    assert casts.is_first("expert", weight) is True
    casts.begin(False)
    assert casts.is_first("expert", weight) is False


def test_a_weight_that_was_written_to_is_cast_anew() -> None:
    casts, weight = WeightCasts(), nn.Parameter(torch.ones(2))
    casts.begin(True)
    assert casts.is_first("a", weight) is True
    with torch.no_grad():
        weight.mul_(2.0)
    casts.begin(False)
    assert not casts.reuses("a", weight)
    assert casts.is_first("a", weight) is True
    assert casts.reuses("a", weight)


def test_a_shared_layer_is_cast_once_and_a_recomputation_uses_that_cast() -> None:
    casts, weight = WeightCasts(), nn.Parameter(torch.ones(2))
    casts.begin(True)
    assert [casts.is_first("a", weight) for _ in range(2)] == [True, False]
    with casts.paused():  # an evaluation before the backward pass
        assert casts.is_first("a", weight) is None
    assert casts.is_first("a", weight) is False  # in the backward pass: no context is open


# Recomputation


class Scaled(torch.autograd.Function):
    """Multiplies by a scale that it saves, as a cast does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.saved_tensors[1], None


class Layer(nn.Module):
    """Casts with its state's scale, or in a recomputation with the first run's; stages once."""

    def __init__(self, name: str, recomputation: Recomputation, own: DirectionState) -> None:
        super().__init__()
        self.name, self.own, self.recomputation = name, own, recomputation
        self.used: list[float] = []
        self.staged = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        repeated = self.recomputation.repeated
        scale = self.own.scale
        if repeated is None:
            self.staged += 1
        else:
            assert repeated.fp8
            assert repeated.scales is not None
            scale = repeated.scales[self.name]
        self.used.append(scale[0].item())
        return torch.sin(Scaled.apply(x, scale[0].clone()))


def test_blocks_are_recomputed_with_the_scales_of_their_own_first_run() -> None:
    own = {"a": state(2.0), "b": state(3.0)}
    taken = 0

    def take_down() -> FirstRun:
        nonlocal taken
        taken += 1
        return FirstRun(True, ForwardScales(own))

    recomputation = Recomputation(take_down)
    layers = [Layer(name, recomputation, own[name]) for name in own]

    def region(x: torch.Tensor) -> torch.Tensor:
        recomputation.region_changes()
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=recomputation.contexts)
        recomputation.region_changes()
        for name in own:  # the update on leaving the region, in place
            own[name].scale.mul_(10.0)
        return x

    x = torch.tensor(0.3, requires_grad=True)
    first, second = region(x), region(x)  # two regions wait for their backward passes
    assert taken == 2
    second.backward()
    first.backward()
    assert layers[0].used == [2.0, 20.0, 20.0, 2.0]
    assert layers[1].used == [3.0, 30.0, 30.0, 3.0]
    assert [layer.staged for layer in layers] == [2, 2]
    assert recomputation.repeated is None
    expected = torch.tensor(0.3, requires_grad=True)
    for a, b in ((2.0, 3.0), (20.0, 30.0)):
        torch.sin(torch.sin(expected * a) * b).backward()
    assert x.grad is not None
    assert expected.grad is not None
    assert torch.allclose(x.grad, expected.grad, rtol=1e-6)


def test_nothing_is_taken_down_without_a_checkpointed_block() -> None:
    def refuse() -> FirstRun:
        raise AssertionError

    recomputation = Recomputation(refuse)
    recomputation.region_changes()
    recomputation.region_changes()


# The interval of scales


def updated(interval: ScaleInterval, scales: dict[str, torch.Tensor], value: float) -> list[float]:
    """One update: every scale has been computed anew, as ``value``; what becomes of them."""
    for scale in scales.values():
        scale.fill_(value)
    interval.after_update("forward", scales)
    return [scale[0].item() for scale in scales.values()]


def test_scales_stand_between_the_updates_that_are_due() -> None:
    interval, scales = ScaleInterval(3), {"a": torch.ones(3)}
    seen = [updated(interval, scales, value)[0] for value in (2.0, 4.0, 8.0, 16.0, 32.0)]
    assert seen == [2.0, 2.0, 2.0, 16.0, 16.0]
    assert interval.updates == {"forward": 5, "backward": 0}
    each = ScaleInterval(1)
    assert [updated(each, scales, value)[0] for value in (2.0, 4.0)] == [2.0, 4.0]


def test_a_layer_that_joins_between_two_due_updates_takes_no_other_layers_scale() -> None:
    interval = ScaleInterval(2)
    first, last = torch.ones(3), torch.ones(3)
    first_seen = {"a": first, "c": last}
    for name, scale in first_seen.items():
        scale.fill_({"a": 2.0, "c": 5.0}[name])
    interval.after_update("forward", first_seen)
    joined = {"a": first, "b": torch.ones(3), "c": last}
    assert updated(interval, joined, 7.0) == [2.0, 1.0, 5.0]
    assert updated(interval, joined, 9.0) == [9.0, 9.0, 9.0]


def test_loaded_scales_are_held_until_an_update_is_due() -> None:
    interval, scales = ScaleInterval(4), {"a": torch.full((3,), 6.0)}
    interval.updates["forward"] = 3  # as a checkpoint says
    interval.hold("forward", scales)
    assert updated(interval, scales, 8.0) == [6.0]
    assert updated(interval, scales, 10.0) == [10.0]


# Overrides


@pytest.mark.parametrize("override", list(itertools.product((False, True), repeat=3)))
def test_an_operand_is_cast_where_a_gemm_reads_it_in_fp8(override: tuple[bool, ...]) -> None:
    fprop, dgrad, wgrad = (not high for high in override)
    use = OperandUse.of((not fprop, not dgrad, not wgrad))
    # The operands of each GEMM, and which way round a Hopper GEMM reads them.
    reads = {
        "input": fprop, "weight": fprop, "grad_output": dgrad,
        "weight_transposed": dgrad, "input_transposed": wgrad, "grad_output_transposed": wgrad,
    }  # fmt: skip
    for operand in ("input", "weight", "grad_output"):
        transposed = f"{operand}_transposed"
        assert getattr(use, transposed) == reads[transposed]
        assert getattr(use, operand) == (reads[operand] or reads[transposed])


# Infinities


def test_infinities_are_counted_by_layer_and_column() -> None:
    clean, held = state(1.0, 0.0, 1.0, math.nan), state(1.0, 0.0, math.inf, math.inf)
    held.amax_history[1, 1] = 2.0
    columns = ("input", "weight", "output")
    names, counts = infinities({"a": clean, "b.c": held}, columns)
    assert counts is not None
    assert dict(zip(names, counts.tolist(), strict=True)) == {
        "fp8/a/input/infinities": 0,
        "fp8/a/weight/infinities": 0,
        "fp8/a/output/infinities": 0,
        "fp8/b.c/input/infinities": 2,
        "fp8/b.c/weight/infinities": 1,
        "fp8/b.c/output/infinities": 2,
    }
    assert infinities({}, columns) == ([], None)
