"""FP8 health, counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp8core.engines.emulated import EmulatedEngine

Make = Callable[..., EmulatedEngine]


def probe(engine: EmulatedEngine) -> nn.Module:
    linear = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        linear.weight.fill_(0.5)
    return engine.convert_linear(linear, "block.layer")


def step(engine: EmulatedEngine, layer: nn.Module, input: torch.Tensor, grad: float) -> None:
    with engine.training_context():
        output = layer(input)
    output.backward(torch.full_like(output, grad))
    engine.after_backward()


def planted() -> torch.Tensor:
    """256 elements at scale 1: 8 saturate, 4 underflow (one of them negative), 16 are zero."""
    input = torch.ones(16, 16)
    flat = input.view(-1)
    flat[0:8] = 500.0  # above 448
    flat[8:12] = torch.tensor([1e-4, -1e-4, 2.0**-10, 5e-4])  # at most half of 2^-9: zero
    flat[12] = 0.001  # above half of 2^-9: kept
    flat[16:32] = 0.0
    flat[32] = 448.0  # the largest number does not saturate
    return input


def test_the_figures(delayed: Make) -> None:
    engine = delayed()
    layer = probe(engine)
    engine.record_health(True)
    step(engine, layer, planted(), grad=1e-6)
    figures = engine.health()
    assert figures == {
        "fp8/block.layer/input/amax": 500.0,
        "fp8/block.layer/input/scale": 1.0,
        "fp8/block.layer/input/saturated": 8 / 256,
        "fp8/block.layer/input/underflow": 4 / 256,
        "fp8/block.layer/weight/amax": 0.5,
        "fp8/block.layer/weight/scale": 1.0,
        "fp8/block.layer/weight/saturated": 0.0,
        "fp8/block.layer/weight/underflow": 0.0,
        "fp8/block.layer/grad_output/amax": pytest.approx(1e-6, rel=2**-8),
        "fp8/block.layer/grad_output/scale": 1.0,
        "fp8/block.layer/grad_output/saturated": 0.0,
        "fp8/block.layer/grad_output/underflow": 1.0,  # below half of 2^-16
    }
    # Next step: the scale is 448/500, under which 500 is the largest number and 1e-4 still lost.
    engine.record_health(True)
    step(engine, layer, planted(), grad=1e-6)
    figures = engine.health()
    assert figures["fp8/block.layer/input/scale"] == pytest.approx(448 / 500)
    assert figures["fp8/block.layer/input/saturated"] == 0.0
    assert figures["fp8/block.layer/grad_output/underflow"] == 0.0


def test_several_micro_batches_are_taken_together(delayed: Make) -> None:
    engine = delayed(amax_history_len=1, amax_compute_algo="most_recent")
    layer = probe(engine)
    engine.record_health(True)
    step(engine, layer, torch.full((16, 16), 448.0), grad=1.0)
    step(engine, layer, torch.full((16, 16), 896.0), grad=1.0)  # at scale 1: all saturate
    figures = engine.health()
    assert figures["fp8/block.layer/input/saturated"] == 0.5
    assert figures["fp8/block.layer/input/amax"] == 896.0


def test_nothing_is_recorded_unless_asked_for(delayed: Make) -> None:
    engine = delayed()
    layer = probe(engine)
    step(engine, layer, planted(), grad=1.0)
    assert engine.health() == {}
    engine.record_health(True)
    step(engine, layer, planted(), grad=1.0)
    engine.record_health(False)
    assert engine.health() == {}
    engine.record_health(True)
    assert engine.health() == {}


def test_neither_evaluation_nor_recomputation_counts(delayed: Make) -> None:
    engine = delayed(use_autocast_during_eval=True)
    layer = probe(engine)
    engine.record_health(True)
    with torch.no_grad(), engine.evaluation_context():
        layer(planted())
    assert engine.health() == {}
    with engine.training_context():
        output = torch.utils.checkpoint.checkpoint(layer, planted(), use_reentrant=False)
    once = engine.health()
    output.sum().backward()
    again = engine.health()
    assert {key: again[key] for key in once} == once


def test_an_overridden_tensor_has_no_figures(delayed: Make) -> None:
    engine = delayed(override_linear_precision=(False, True, True))
    layer = probe(engine)
    engine.record_health(True)
    step(engine, layer, planted(), grad=1.0)
    tensors = {key.split("/")[2] for key in engine.health()}
    assert tensors == {"input", "weight"}


def test_current_scaling_never_saturates(current: Make) -> None:
    engine = current()
    layer = probe(engine)
    engine.record_health(True)
    step(engine, layer, planted(), grad=1e-6)
    figures = engine.health()
    assert figures["fp8/block.layer/input/scale"] == pytest.approx(448 / 500)
    assert {value for key, value in figures.items() if key.endswith("saturated")} == {0.0}


def test_infinities_in_the_history_are_counted_while_they_sit_there(delayed: Make) -> None:
    engine = delayed(amax_history_len=3)
    layer = probe(engine)
    counts = []
    for index in range(5):
        input = torch.ones(16, 16)
        if index == 1:
            input[0, 0] = float("inf")
        engine.record_health(True)
        step(engine, layer, input, grad=1.0)
        figures = engine.health()
        counts.append(figures.get("fp8/block.layer/input/infinities"))
        assert "fp8/block.layer/weight/infinities" not in figures
        assert "fp8/block.layer/grad_output/infinities" not in figures
    assert counts == [None, 1.0, 1.0, None, None]
