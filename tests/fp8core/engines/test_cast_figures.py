"""What casts do to tensors is counted exactly, whatever their shape and wherever scales are from.

The same cases run on a GPU in test_cast_figures_gpu.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fp8core.engines.cast_figures import CastFigures, CastRule, ScaleFrom
from fp8core.engines.te_health import HealthRecorder, cast_rules
from fp8core.numerics.float8_weight import cast_weight
from fp8core.spec.recipe import TEMXFP8, TEBlock, TECurrent, TEDelayed
from tests.fp8core.engines.cast_cases import Case, by_hand, cases, cases_of_many

CPU = torch.device("cpu")
GIVEN = CastRule.of("e4m3", ScaleFrom.GIVEN)


def figures_of(case: Case, device: torch.device = CPU) -> tuple[float, float, int, int]:
    gathered = CastFigures(["x"], device)
    gathered.add("x", case.tensor, case.rule, case.scale)
    found = gathered.read_later()()
    elements = case.tensor.numel()
    return (
        found["x/amax"],
        found["x/scale"],
        round(found["x/saturated"] * elements),
        round(found["x/underflow"] * elements),
    )


def test_every_case_is_what_the_definitions_give() -> None:
    seen = 0
    for case in cases():
        assert figures_of(case) == by_hand(case), case.label
        seen += 1
    assert seen == 6 * 3 * 2 * len(ScaleFrom) * 2


def test_many_together_are_counted_as_one_by_one() -> None:
    for rule, tensors in cases_of_many():
        together, one_by_one = (CastFigures(list(tensors), CPU) for _ in range(2))
        for _ in range(2):  # the second time onto what the first counted
            together.add_all(tensors, rule)
            for name, tensor in tensors.items():
                one_by_one.add(name, tensor, rule)
        found = together.read_later()()
        assert "empty/amax" not in found
        assert len(found) == 4 * (len(tensors) - 1)
        assert math.isnan(found["nan/amax"])
        assert repr(found) == repr(one_by_one.read_later()()), rule


def test_many_with_scales_of_their_own_are_refused_together() -> None:
    gathered = CastFigures(["x"], CPU)
    with pytest.raises(ValueError, match="given scales"):
        gathered.add_all({"x": torch.ones(4)}, GIVEN)


def test_edges_of_the_formats() -> None:
    for fp8_format, largest, smallest in (("e4m3", 448.0, 2.0**-9), ("e5m2", 57344.0, 2.0**-16)):
        rule = CastRule.of(fp8_format, ScaleFrom.GIVEN)
        values = torch.tensor([[largest, largest * 2, smallest / 2, smallest * 0.51, 0.0, -1.0]])
        gathered = CastFigures(["x"], CPU)
        gathered.add("x", values, rule, torch.tensor(1.0))
        found = gathered.read_later()()
        # The largest number stays, half of the smallest subnormal goes to zero (ties to even).
        assert (found["x/saturated"], found["x/underflow"]) == (1 / 6, 1 / 6)


def test_values_that_are_no_numbers_are_seen() -> None:
    gathered = CastFigures(["nan", "infinite", "empty"], CPU)
    gathered.add("nan", torch.tensor([1.0, float("nan"), float("inf")]), GIVEN, torch.tensor(1.0))
    gathered.add("infinite", torch.tensor([1.0, -float("inf")]), GIVEN, torch.tensor(1.0))
    gathered.add("empty", torch.empty(0, 16), GIVEN, torch.tensor(1.0))
    found = gathered.read_later()()
    assert math.isnan(found["nan/amax"])
    assert found["infinite/amax"] == float("inf")
    assert found["infinite/saturated"] == 0.5
    assert not [key for key in found if key.startswith("empty")]


def test_what_is_cast_twice_is_taken_together_and_clearing_forgets() -> None:
    gathered = CastFigures(["x"], CPU)
    gathered.add("x", torch.tensor([900.0, 1.0]), GIVEN, torch.tensor(1.0))
    gathered.add("x", torch.tensor([2.0, 1.0]), GIVEN, torch.tensor(0.5))
    read = gathered.read_later()
    gathered.clear()
    assert gathered.read_later()() == {}
    assert read() == {"x/amax": 900.0, "x/scale": 0.5, "x/saturated": 0.25, "x/underflow": 0.0}


def test_rules_follow_the_recipe() -> None:
    delayed = cast_rules(TEDelayed(fp8_format="HYBRID"))
    assert {tensor: rule.largest for tensor, rule in delayed.items()} == {
        "input": 448.0,
        "weight": 448.0,
        "grad_output": 57344.0,
    }
    assert cast_rules(TEDelayed(fp8_format="E4M3"))["grad_output"].largest == 448.0
    # Of a GEMM kept in high precision nothing is cast: of all but wgrad, the weight.
    only_wgrad = TEDelayed(override_linear_precision=(True, True, False))
    assert set(cast_rules(only_wgrad)) == {"input", "grad_output"}
    current = cast_rules(TECurrent(scaling="current", use_power_2_scales=True))
    assert current["input"].scale_from is ScaleFrom.TENSOR
    assert current["input"].power_of_two
    forward = TEBlock(scaling="block", backward_override="high_precision")
    assert set(cast_rules(forward)) == {"input", "weight"}
    block = cast_rules(TEBlock(scaling="block"))
    assert block["input"].scale_from is ScaleFrom.ROW_BLOCKS
    assert block["weight"].scale_from is ScaleFrom.TILES
    assert block["weight"].power_of_two
    assert cast_rules(TEMXFP8(scaling="mxfp8")) == {}


class NormedPair(nn.Module):
    """What a fused module of two GEMMs looks like from outside."""

    normalization, zero_centered_gamma, eps = "RMSNorm", False, 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.rand(16) + 0.5)
        self.first = nn.Parameter(torch.randn(32, 16))
        self.second = nn.Parameter(torch.randn(16, 32))
        self._gemms = (".up", ".down")

    def _get_weight_tensors(self) -> list[nn.Parameter]:
        return [self.first, self.second]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalised = nn.functional.rms_norm(x, (16,), self.layer_norm_weight, self.eps)
        return (normalised @ self.first.T).relu() @ self.second.T


def test_a_fused_module_shows_what_lies_outside_of_its_kernels() -> None:
    module = NormedPair()
    one = torch.tensor(1.0)
    scales = {
        (f"mlp{gemm}", tensor): one * (2 if gemm == ".down" else 4)
        for gemm in (".up", ".down")
        for tensor in ("input", "weight", "grad_output")
    }
    scales["attention.core", "qkv"] = one * 8
    recorder = HealthRecorder(lambda: scales, cast_rules(TEDelayed()), torch.device("cpu"))
    recorder.record(True, {"mlp": module}, [("attention.core", "qkv")])
    recorder.before_forward()
    x = torch.randn(4, 16, requires_grad=True)
    module(x).backward(torch.full((4, 16), 3.0))
    amaxes = {("mlp.down", "input"): one * 7, ("mlp.up", "grad_output"): one * 9}
    read = recorder.read_later({**amaxes, ("attention.core", "qkv"): one * 5})
    assert read is not None
    found = read()
    normalised = nn.functional.rms_norm(x.detach(), (16,), module.layer_norm_weight.detach(), 1e-5)
    assert found["fp8/mlp.up/input/amax"] == float(normalised.abs().max())
    assert found["fp8/mlp.down/weight/amax"] == float(module.second.detach().abs().max())
    assert found["fp8/mlp.down/grad_output/amax"] == 3.0
    assert (found["fp8/mlp.down/input/amax"], found["fp8/mlp.down/input/scale"]) == (7.0, 2.0)
    assert (found["fp8/mlp.up/grad_output/amax"], found["fp8/mlp.up/grad_output/scale"]) == (9, 4)
    assert (found["fp8/attention.core/qkv/amax"], found["fp8/attention.core/qkv/scale"]) == (5, 8)
    counted = {key.removesuffix("/underflow") for key in found if key.endswith("underflow")}
    assert counted == {
        "fp8/mlp.up/input",
        "fp8/mlp.up/weight",
        "fp8/mlp.down/weight",
        "fp8/mlp.down/grad_output",
    }


@pytest.fixture
def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"first": nn.Linear(16, 32), "second": nn.Linear(32, 16)}


def test_a_recorded_pass_has_each_tensor_of_each_layer(layers: dict[str, nn.Module]) -> None:
    scales = {
        (name, tensor): torch.tensor(float(place + 1))
        for place, name in enumerate(layers)
        for tensor in ("input", "weight", "grad_output")
    }
    recorder = HealthRecorder(lambda: scales, cast_rules(TEDelayed()), torch.device("cpu"))
    x = torch.randn(4, 16, requires_grad=True)
    recorder.record(True, layers)
    recorder.before_forward()
    for key in scales:  # the update behind the forward pass replaces what the casts used
        scales[key] = torch.tensor(99.0)
    with torch.no_grad():  # an evaluation in between does not count
        layers["first"](x * 1000)
    hidden = layers["first"](x)
    hidden.retain_grad()
    layers["second"](hidden).sum().backward()
    read = recorder.read_later({})
    recorder.record(False, layers)
    layers["first"](x * 1000)  # nor what comes after
    assert recorder.read_later({}) is None
    assert read is not None
    found = read()
    assert len(found) == 2 * 3 * 4
    assert hidden.grad is not None
    assert found["fp8/first/input/amax"] == float(x.detach().abs().max())
    assert found["fp8/first/grad_output/amax"] == float(hidden.grad.abs().max())
    assert found["fp8/second/grad_output/amax"] == 1.0
    weight = layers["second"].weight
    assert isinstance(weight, torch.Tensor)
    assert found["fp8/second/weight/amax"] == float(weight.detach().abs().max())
    assert found["fp8/first/input/scale"] == 1.0
    assert found["fp8/second/weight/scale"] == 2.0


class Projection(nn.Module):
    """One whose weight is another module's Parameter, as those of torch's attention are."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_a_layer_without_a_parameter_of_its_own_is_recorded() -> None:
    packed = nn.Parameter(torch.randn(3 * 16, 16))
    modules = {"q": Projection(packed[:16]), "v": Projection(packed[32:])}
    recorder = HealthRecorder(dict, cast_rules(TECurrent(scaling="current")), torch.device("cpu"))
    recorder.record(True, modules)
    recorder.before_forward()
    sum(module(torch.randn(4, 16)).sum() for module in modules.values()).backward()
    read = recorder.read_later({})
    assert read is not None
    found = read()
    assert len(found) == 2 * 3 * 4
    assert found["fp8/v/weight/amax"] == float(packed[32:].detach().abs().max())


def test_a_weight_in_fp8_has_the_figures_of_its_one_cast() -> None:
    """In each recorded step, and as those of no layer that is recorded no more."""
    recorder = HealthRecorder(dict, cast_rules(TECurrent(scaling="current")), torch.device("cpu"))
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    (stored,) = cast_weight([weight])
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = nn.Parameter(stored, requires_grad=False)
    x = torch.ones(4, 16, requires_grad=True)
    for _ in range(2):
        recorder.record(True, {"a": layer})
        recorder.before_forward()
        layer(x).sum().backward()
        read = recorder.read_later({})
        assert read is not None
        figures = read()
        amax = float(weight.abs().max())
        assert figures["fp8/a/weight/amax"] == amax
        assert figures["fp8/a/weight/scale"] == pytest.approx(448 / amax)
        assert figures["fp8/a/weight/saturated"] == 0.0
        assert figures["fp8/a/weight/underflow"] == stored.cast.underflow
        assert figures["fp8/a/input/amax"] == 1.0
        recorder.record(False, {})
    recorder.record(True, {"b": nn.Linear(16, 16)})
    read = recorder.read_later({})
    assert read is not None
    assert not any(name.startswith("fp8/a/") for name in read())
