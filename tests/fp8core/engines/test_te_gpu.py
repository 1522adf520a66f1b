"""The te engine on a real GPU: each recipe field seen to have its effect, GEMMs by kernel name."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fp8core.conversion import convert
from fp8core.engines import transformer_engine as te_engine
from fp8core.engines.gemm_watch import GemmWatch
from fp8core.spec import Conversion, parse_spec
from tests.fp8core.kernel_names import E4M3_BY_E4M3, E4M3_BY_E5M2, launched, launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def engine_for(**recipe: Any) -> te_engine.TransformerEngine:
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": "te", **recipe},
        }
    )
    return te_engine.TransformerEngine(spec.recipe, DEVICE)


class Net(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def converted(engine: te_engine.TransformerEngine, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net().to(DEVICE)
    for name, child in list(net.named_children()):
        assert engine.linear_refusal(child) is None
        setattr(net, name, engine.convert_linear(child, name))
    return net


def inputs(step: int, amplitude: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(1000 + step)
    return torch.randn(64, 256, device=DEVICE, generator=generator) * amplitude


def step(engine: te_engine.TransformerEngine, net: Net, x: torch.Tensor) -> torch.Tensor:
    net.zero_grad()
    with engine.training_context():
        loss = net(x).float().pow(2).mean()
    loss.backward()
    engine.after_backward()
    return loss.detach()


@pytest.mark.parametrize("override", list(itertools.product((False, True), repeat=3))[:-1])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_override_runs_exactly_the_named_gemms_in_high_precision(
    override: tuple[bool, bool, bool], scaling: str
) -> None:
    engine = engine_for(scaling=scaling, override_linear_precision=list(override))
    net = converted(engine)
    for index in range(3):
        step(engine, net, inputs(index))
    names = launched(lambda: step(engine, net, inputs(9)))
    # e4m3 x e4m3 is fprop; e4m3 x e5m2 the two backward GEMMs; everything else runs in bf16.
    forward, backward = launches(names, E4M3_BY_E4M3), launches(names, E4M3_BY_E5M2)
    assert forward == (0 if override[0] else 2), names
    # The first layer's dgrad is not needed: its input is the data.
    expected = (0 if override[1] else 1) + (0 if override[2] else 2)
    assert backward == expected, names


@pytest.mark.parametrize("override", list(itertools.product((False, True), repeat=3))[:-1])
def test_override_changes_precision_only(override: tuple[bool, bool, bool]) -> None:
    engine = engine_for(override_linear_precision=list(override))
    net = converted(engine)
    torch.manual_seed(0)
    reference = Net().to(DEVICE)
    for index in range(3):
        step(engine, net, inputs(index))
    x = inputs(5)
    loss = step(engine, net, x)
    reference_loss = reference(x).pow(2).mean()
    reference_loss.backward()
    assert abs(loss.item() - reference_loss.item()) / reference_loss.item() < 0.05
    for name, parameter in reference.named_parameters():
        mine = net.get_parameter(name).grad
        assert mine is not None
        assert parameter.grad is not None
        error = (mine - parameter.grad).norm() / parameter.grad.norm()
        # Bounds E5M2's rounding (2 mantissa bits) on top of E4M3's in the forward pass.
        assert error < 0.2, (name, error)


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_all_gemms_in_high_precision_leave_the_layers_as_they_were(scaling: str) -> None:
    """The eighth tuple: every Linear is kept, and computes what bf16 autocast alone does."""
    engine = engine_for(scaling=scaling, override_linear_precision=[True, True, True])
    torch.manual_seed(0)
    net = Net().to(DEVICE)
    reference = copy.deepcopy(net)
    report = convert(net, engine, Conversion())
    reasons = {row.name: row.reason for row in report.rows if row.name != "blocks"}
    told = "override_linear_precision keeps all three GEMMs in high precision"
    assert reasons == {"first": told, "second": told}
    engine.record_health(True)
    losses: list[torch.Tensor] = []
    names = launched(lambda: losses.extend(step(engine, net, inputs(index)) for index in range(2)))
    assert any("gemm" in name or "nvjet" in name for name in names), names
    assert not launches(names, E4M3_BY_E4M3) + launches(names, E4M3_BY_E5M2)
    assert engine.health() == {}
    for index, loss in enumerate(losses):
        reference.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            expected = reference(inputs(index)).float().pow(2).mean()
        expected.backward()
        assert torch.equal(loss, expected.detach())
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    engine.load_state_dict(engine.state_dict())


def test_interval_changes_scales_only_when_due_while_histories_advance() -> None:
    for override in ((False, False, False), (False, False, True)):
        engine = engine_for(
            interval=3, amax_history_len=4, override_linear_precision=list(override)
        )
        net = converted(engine)
        scales, histories = [], []
        for index in range(9):
            step(engine, net, inputs(index, amplitude=1.0 + index))
            state = engine.state_dict()
            scales.append(state["first/forward/scale"][0].item())
            histories.append(state["first/forward/amax_history"][-1, 0].item())
        assert len(set(histories)) == 9
        changed = [
            index for index in range(9) if scales[index] != (scales[index - 1] if index else 1.0)
        ]
        assert changed == [0, 3, 6], scales


@pytest.mark.parametrize("wgrad_high", [False, True])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_scales_follow_the_formula(algorithm: str, margin: int, wgrad_high: bool) -> None:
    engine = engine_for(
        amax_history_len=4,
        amax_compute_algo=algorithm,
        margin=margin,
        override_linear_precision=[False, False, wgrad_high],
    )
    net = converted(engine)
    if not wgrad_high:
        assert [layer.name for layer in net.children()] == ["first", "second"]
    amaxes = []
    for index in range(7):
        x = inputs(index, amplitude=10.0 / (index + 1))
        amaxes.append(x.abs().max().item())
        step(engine, net, x)
        window = amaxes[-4:] if algorithm == "max" else amaxes[-1:]
        expected = MAX["e4m3"] * 2.0**-margin / max(window)
        scale = engine.state_dict()["first/forward/scale"][0].item()
        assert scale == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("wgrad_high", [False, True])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_with_e4m3_gradients_are_cast_to_it_too(scaling: str, wgrad_high: bool) -> None:
    override = [False, False, wgrad_high]
    engine = engine_for(scaling=scaling, fp8_format="E4M3", override_linear_precision=override)
    net = converted(engine)
    for index in range(2):
        step(engine, net, inputs(index))
    names = launched(lambda: step(engine, net, inputs(9)))
    # Two of fprop, one of dgrad (the first layer's input is the data), two of wgrad.
    assert launches(names, E4M3_BY_E4M3) == (3 if wgrad_high else 5), names
    assert not launches(names, E4M3_BY_E5M2), names


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"scaling": "current", "use_power_2_scales": False}, 0.8984375),
        ({"scaling": "current", "use_power_2_scales": True}, 0.875),
        ({"scaling": "block", "use_f32_scales": True}, 0.8984375),
        ({"scaling": "block", "use_f32_scales": False}, 0.875),
    ],
)
def test_scales_are_rounded_as_the_recipe_says(recipe: dict[str, Any], expected: float) -> None:
    """The largest element becomes FP8_MAX itself, or, scaled by 256 instead, is rounded."""
    engine = engine_for(**recipe)
    linear = nn.Linear(256, 256, bias=False, device=DEVICE)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(256))
    layer = engine.convert_linear(linear, "layer")
    x = torch.zeros(64, 256, device=DEVICE)
    x[:, ::128] = 0.8984375  # a bf16 number; 448 / 0.8984375 is 498.6
    with engine.training_context():
        found = layer(x)
    assert found[:, ::128].float().unique().tolist() == [expected]


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("tensor", ["x", "w", "grad"])
def test_blocks_have_the_shape_that_the_recipe_says(tensor: str, tiled: bool) -> None:
    """One large element costs the small ones of its block their bits: those of its strip of 128, or
    of 128 rows."""
    dimensions = {f"{each}_block_scaling_dim": 1 for each in ("x", "w", "grad")}
    dimensions[f"{tensor}_block_scaling_dim"] = 2 if tiled else 1
    engine = engine_for(scaling="block", **dimensions)
    even, uneven = torch.eye(256, device=DEVICE), torch.eye(256, device=DEVICE) * 2.0**-14
    uneven[0, 0] = 448.0
    linear = nn.Linear(256, 256, bias=False, device=DEVICE)
    with torch.no_grad():
        linear.weight.copy_(uneven if tensor == "w" else even)
    layer = engine.convert_linear(linear, "layer")
    x = (uneven if tensor == "x" else even).clone().requires_grad_()
    with engine.training_context():
        output = layer(x)
    output.backward((uneven if tensor == "grad" else even).to(output.dtype))
    engine.after_backward()
    found = x.grad if tensor == "grad" else output.detach()
    assert found is not None
    diagonal = found.float().diagonal()
    assert diagonal[0].item() == 448.0
    # Rows 1 to 127 share a tile with it, and no strip.
    assert diagonal[1:128].unique().tolist() == [0.0 if tiled else 2.0**-14]
    assert diagonal[128:].unique().tolist() == [2.0**-14]


@pytest.mark.parametrize("fp8_format", ["E4M3", "HYBRID"])
@pytest.mark.parametrize("backward", [None, "high_precision", "dequantized"])
def test_backward_override_and_format_of_blocks(backward: str | None, fp8_format: str) -> None:
    engine = engine_for(scaling="block", backward_override=backward, fp8_format=fp8_format)
    assert engine.fusion_refusal() is None
    torch.manual_seed(0)
    linear = nn.Linear(256, 512, bias=False, device=DEVICE)
    layer = engine.convert_linear(linear, "layer")
    x = inputs(0).requires_grad_()
    gradient = torch.randn(64, 512, device=DEVICE).bfloat16()
    with GemmWatch({"layer": layer}, x.shape) as watch:
        with engine.training_context():
            output = layer(x)
        output.backward(gradient)
        engine.after_backward()
    seen = {gemm: next(iter(formats)) for gemm, formats in watch.seen["layer"].items()}
    grad = "fp8_e5m2" if fp8_format == "HYBRID" else "fp8_e4m3"
    assert seen == {
        "fprop": ("fp8_e4m3", "fp8_e4m3"),
        "dgrad": ("bf16", "bf16") if backward else (grad, "fp8_e4m3"),
        "wgrad": ("bf16", "bf16") if backward else (grad, "fp8_e4m3"),
    }
    assert x.grad is not None
    assert layer.weight.grad is not None
    exact = gradient.double() @ linear.weight.double(), gradient.double().t() @ x.double()
    for own, other in zip((x.grad, layer.weight.grad), exact, strict=True):
        error = ((own.double() - other).norm() / other.norm()).item()
        # bf16 rounds to 0.3 %, one operand in E4M3 to 2 or 3 %.
        assert error < 0.01 if backward == "high_precision" else 0.01 < error < 0.1, error


def test_state_goes_round_and_training_goes_on_equally() -> None:
    for override in ((False, False, False), (True, False, False)):
        options = {"amax_history_len": 8, "override_linear_precision": list(override)}
        engine = engine_for(**options)
        net = converted(engine)
        for index in range(5):
            step(engine, net, inputs(index, amplitude=1.0 + index))
        saved = {key: value.cpu() for key, value in engine.state_dict().items()}
        weights = {key: value.clone() for key, value in net.state_dict().items()}
        assert not [key for key in weights if "extra_state" in key]
        expected = step(engine, net, inputs(7))

        other = engine_for(**options)
        again = converted(other, seed=1)
        again.load_state_dict(weights)
        other.load_state_dict(saved)
        for key, value in other.state_dict().items():
            assert torch.equal(value.cpu(), saved[key]), key
        assert torch.equal(step(other, again, inputs(7)), expected)


def test_health_counts_saturation_and_underflow() -> None:
    engine = engine_for(amax_history_len=1)
    net = converted(engine)
    step(engine, net, inputs(0))
    engine.record_health(True)
    x = inputs(1, amplitude=100.0)
    step(engine, net, x)
    health = engine.health()
    engine.record_health(False)
    assert health["fp8/first/input/amax"] == pytest.approx(x.abs().max().item(), rel=1e-6)
    scale = MAX["e4m3"] / inputs(0).abs().max().item()
    assert health["fp8/first/input/scale"] == pytest.approx(scale, rel=1e-6)
    saturated = (x.abs() * scale > MAX["e4m3"]).float().mean().item()
    assert health["fp8/first/input/saturated"] == pytest.approx(saturated, abs=1e-6)
    assert 0 <= health["fp8/second/grad_output/underflow"] < 1
    assert engine.health() == {}


def test_evaluation_leaves_state_alone_and_is_high_precision_unless_set() -> None:
    for option, fp8_expected in ((False, False), (True, True)):
        engine = engine_for(use_autocast_during_eval=option)
        net = converted(engine)
        for index in range(2):
            step(engine, net, inputs(index))
        before = engine.state_dict()
        with torch.no_grad(), engine.evaluation_context():
            names = launched(functools.partial(net, inputs(5)))
        assert (launches(names, E4M3_BY_E4M3) > 0) == fp8_expected, names
        for key, value in engine.state_dict().items():
            assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4"])
def test_blackwell_recipes_are_refused_on_hopper_with_the_reason(scaling: str) -> None:
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this device can")
    from fp8core.errors import EngineUnsupported

    with pytest.raises(EngineUnsupported, match=r"10\.0"):
        engine_for(scaling=scaling)
