"""FP8 health of the torchao engine: what a cast loses, by tensors and by rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fp8core.engines.torchao_health import Rule, measure
from tests.fp8core.engines.torchao_on_cpu import Make, engine, nothing_compiled

__all__ = ["engine", "nothing_compiled"]  # fixtures


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_health_counts_what_a_cast_loses(engine: Make, backend: str | None) -> None:
    torch.manual_seed(0)
    net, made = nn.Sequential(nn.Linear(32, 16, bias=False)), engine(backend)
    net[0] = made.convert_linear(net[0], "0")
    made.prepare(net)
    input = torch.ones(16, 32)
    input[0, 0] = 448.0  # the scale is 1
    input[0, 1:5] = torch.tensor([1e-4, -1e-4, 2.0**-10, 0.0])  # three of them vanish
    gradient = torch.full((16, 16), 2.0**-3)

    def run() -> None:
        with made.training_context():
            output = net(input)
        output.backward(gradient.bfloat16())
        made.after_backward()

    run()
    assert made.health() == {}
    made.record_health(True)
    assert made.health() == {}
    run()
    figures = made.health()
    weight = net[0].weight.detach()
    assert figures == {
        "fp8/0/input/amax": 448.0,
        "fp8/0/input/scale": 1.0,
        "fp8/0/input/saturated": 0.0,
        "fp8/0/input/underflow": 3 / 512,
        "fp8/0/weight/amax": weight.abs().max().item(),
        "fp8/0/weight/scale": pytest.approx(448 / weight.abs().max().item()),
        "fp8/0/weight/saturated": 0.0,
        "fp8/0/weight/underflow": 0.0,
        "fp8/0/grad_output/amax": 0.125,
        "fp8/0/grad_output/scale": 57344 * 8.0,
        "fp8/0/grad_output/saturated": 0.0,
        "fp8/0/grad_output/underflow": 0.0,
    }
    made.record_health(False)
    run()
    assert made.health() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rowwise", [False, True])
def test_what_is_measured_is_what_the_definitions_give(
    rowwise: bool, power_of_two: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-30, 10, (4, 33, 48), generator=generator)
    tensor = (torch.randn(4, 33, 48, generator=generator) * 2.0**powers).to(dtype)
    tensor[0, 0] = 0.0
    for largest, smallest in ((448.0, 2.0**-9), (57344.0, 2.0**-16)):
        rule = Rule(largest, smallest, rowwise, power_of_two)
        amax, scale, saturated, underflow, one = measure(tensor, rule).tolist()
        magnitudes = tensor.double().abs()
        amaxes = magnitudes.amax(-1, keepdim=True) if rowwise else magnitudes.amax()
        scales = (largest / amaxes.clamp(min=1e-12)).float()
        if power_of_two:
            scales = 2.0 ** scales.double().log2().floor()
        vanish = (magnitudes > 0) & (magnitudes.float() * scales.float() <= smallest / 2)
        assert (amax, saturated, one) == (float(magnitudes.max()), 0.0, 1.0)
        assert scale == pytest.approx(float(scales.min()), rel=1e-6)
        assert underflow == pytest.approx(int(vanish.sum()) / tensor.numel(), rel=1e-6)
        assert underflow > 0


def test_what_is_measured_of_no_number_is_none() -> None:
    for rowwise in (False, True):
        rule = Rule(448.0, 2.0**-9, rowwise, power_of_two=False)
        amax, scale, *_, one = measure(torch.tensor([[1.0, 2.0], [torch.nan, 1.0]]), rule).tolist()
        assert math.isnan(amax)
        assert math.isnan(scale)
        assert one == 1.0


def test_a_layer_that_sees_zeros_alone_has_figures(engine: Make) -> None:
    made = engine()
    layer = made.convert_linear(nn.Linear(16, 16), "l")
    made.record_health(True)
    with made.training_context():
        layer(torch.zeros(16, 16)).sum().backward()
    figures = made.health()
    assert figures["fp8/l/input/amax"] == figures["fp8/l/input/underflow"] == 0.0
    assert figures["fp8/l/grad_output/amax"] == 1.0


def test_rowwise_health_goes_by_rows(engine: Make) -> None:
    made = engine(scaling="rowwise")
    layer = made.convert_linear(nn.Linear(16, 16), "l")
    input = torch.ones(16, 16)
    input[0, 0] = 300.0  # scale 1 in this row alone, where nothing else is lost
    input[0, 1:] = 2.0**-11
    input[1, :] = 2.0**-11
    made.record_health(True)
    with made.training_context():
        layer(input)
    figures = made.health()
    assert figures["fp8/l/input/scale"] == 1.0
    assert figures["fp8/l/input/underflow"] == 15 / 256


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_an_infinity_hides_no_layer(engine: Make, scaling: str) -> None:
    """Its scale is 0, as that of a layer that did not run."""
    made = engine(scaling=scaling)
    layer = made.convert_linear(nn.Linear(16, 16), "l")
    made.convert_linear(nn.Linear(16, 16), "idle")
    made.record_health(True)
    input = torch.ones(16, 16)
    input[3, 3] = torch.inf
    with made.training_context():
        output = layer(input)
    output.sum().backward()
    figures = made.health()
    assert figures["fp8/l/input/amax"] == torch.inf
    assert figures["fp8/l/input/scale"] == 0.0
    assert "fp8/l/weight/amax" in figures
    assert not [key for key in figures if key.startswith("fp8/idle/")]


def test_neither_evaluation_nor_a_layer_used_twice_gives_wrong_figures(engine: Make) -> None:
    made = engine()
    layer = made.convert_linear(nn.Linear(16, 16), "l")
    made.record_health(True)
    with torch.no_grad(), made.evaluation_context():
        layer(torch.ones(16, 16))
    assert made.health() == {}
    with made.training_context():
        output = layer(layer(torch.ones(16, 16)))
    output.sum().backward()
    tensors = {key.split("/")[2] for key in made.health()}
    assert tensors == {"input", "weight"}
