"""Each recipe field of delayed scaling, on a Linear in training, against scales worked out by hand.

Every step feeds one Linear an input, a weight and a grad_output of chosen amaxes. Forward tensors
are E4M3 (448), the gradient is E5M2 (57344) unless the format says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8core.engines.emulated import EmulatedEngine

Make = Callable[..., EmulatedEngine]
FLOAT32_MAX = torch.finfo(torch.float32).max


class Probe:
    """A converted Linear whose tensors take the amaxes they are told to."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self.engine = engine
        self.layer = engine.convert_linear(nn.Linear(16, 16, bias=False), "layer")

    def forward(self, input_amax: float, weight_amax: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.fill_(weight_amax)
        with self.engine.training_context():
            return self.layer(torch.full((16, 16), input_amax))

    def step(self, input_amax: float, grad_amax: float = 1.0, weight_amax: float = 1.0) -> None:
        output = self.forward(input_amax, weight_amax)
        output.backward(torch.full_like(output, grad_amax))
        self.engine.after_backward()

    def scale(self, tensor: str) -> float:
        direction, column = {
            "input": ("forward", 0),
            "weight": ("forward", 1),
            "output": ("forward", 2),
            "grad_output": ("backward", 0),
            "grad_input": ("backward", 1),
        }[tensor]
        return self.engine.state_dict()[f"layer.{direction}.scale"][column].item()

    def history(self, direction: str) -> list[list[float]]:
        return self.engine.state_dict()[f"layer.{direction}.amax_history"].tolist()


def test_amax_history_len(delayed: Make) -> None:
    # Length 3. input 7, 14, 3.5, 3.5, 3.5: the 14 counts in steps 2, 3, 4.
    # 448/7 = 64, 448/14 = 32, 448/3.5 = 128. grad_output 7, 28, ...: 57344/7 = 8192, /28 = 2048.
    probe = Probe(delayed(amax_history_len=3))
    seen = []
    for input_amax, grad_amax in [(7, 7), (14, 28), (3.5, 7), (3.5, 7), (3.5, 7)]:
        probe.step(input_amax, grad_amax)
        seen.append((probe.scale("input"), probe.scale("grad_output")))
    assert seen == [(64, 8192), (32, 2048), (32, 2048), (32, 2048), (128, 8192)]
    assert probe.history("forward") == [[0, 0, 0], [3.5, 1, 0], [3.5, 1, 0]]
    assert probe.history("backward") == [[0, 0], [7, 0], [7, 0]]
    assert (probe.scale("output"), probe.scale("grad_input")) == (1, 1)  # never cast


def test_amax_compute_algo(delayed: Make) -> None:
    # Most recent: 448/7 = 64, 448/14 = 32, 448/3.5 = 128; 57344/28 = 2048, 57344/7 = 8192.
    probe = Probe(delayed(amax_history_len=16, amax_compute_algo="most_recent"))
    seen = []
    for input_amax, grad_amax in [(7, 28), (14, 7), (3.5, 28)]:
        probe.step(input_amax, grad_amax)
        seen.append((probe.scale("input"), probe.scale("grad_output")))
    assert seen == [(64, 2048), (32, 8192), (128, 2048)]


def test_margin(delayed: Make) -> None:
    # 2^3 less than without: 448/7/8 = 8; weight 448/0.5/8 = 112; 57344/7/8 = 1024.
    probe = Probe(delayed(margin=3, amax_history_len=4))
    probe.step(7, 7, weight_amax=0.5)
    assert [probe.scale(name) for name in ("input", "weight", "grad_output")] == [8, 112, 1024]


def test_interval(delayed: Make) -> None:
    # Scales move at updates 1, 3 and 5 only, histories at each. History 2, so update 3 sees
    # max(3.5, 14) = 14: 32, and 57344/14 = 4096; update 5 sees max(7, 7) = 7: 64 and 8192.
    probe = Probe(delayed(interval=2, amax_history_len=2))
    seen = []
    for amax in (28, 14, 3.5, 7, 7):
        probe.step(amax, amax)
        seen.append((probe.scale("input"), probe.scale("grad_output")))
    assert seen == [(16, 2048), (16, 2048), (32, 4096), (32, 4096), (64, 8192)]
    assert probe.history("forward")[1][0] == 7


def test_interval_goes_on_where_the_state_left_it(delayed: Make) -> None:
    first = Probe(delayed(interval=3, amax_history_len=2))
    for _ in range(2):
        first.step(7)
    second = Probe(delayed(interval=3, amax_history_len=2))
    second.engine.load_state_dict(first.engine.state_dict())
    second.step(28)  # the third update holds the scale
    assert second.scale("input") == 64
    second.step(28)  # the fourth computes it: 448/28
    assert second.scale("input") == 16


def test_fp8_format(delayed: Make) -> None:
    # E4M3 has gradients in E4M3 too: 448/7 = 64 in place of 57344/7 = 8192.
    for fmt, expected in (("HYBRID", 8192), ("E4M3", 64)):
        probe = Probe(delayed(fp8_format=fmt, amax_history_len=4))
        probe.step(7, 7)
        assert (probe.scale("input"), probe.scale("grad_output")) == (64, expected)


@pytest.mark.parametrize("override", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_override_linear_precision(delayed: Make, override: tuple[int, int, int]) -> None:
    # A tensor is cast, and tracked, where one of its two GEMMs runs in FP8; else it keeps the
    # scale 1 and an empty history. 448/7 = 64, 448/0.5 = 896, 57344/28 = 2048.
    fprop, dgrad, wgrad = map(bool, override)
    engine = delayed(override_linear_precision=(fprop, dgrad, wgrad), amax_history_len=2)
    probe = Probe(engine)
    with torch.no_grad():
        probe.layer.weight.fill_(0.5)
    input = torch.full((16, 16), 7.0, requires_grad=True)
    with engine.training_context():
        output = probe.layer(input)
    output.backward(torch.full_like(output, 28.0))
    engine.after_backward()
    assert probe.scale("input") == (1 if fprop and wgrad else 64)
    assert probe.scale("weight") == (1 if fprop and dgrad else 896)
    assert probe.scale("grad_output") == (1 if dgrad and wgrad else 2048)
    assert probe.history("forward")[1] == [
        0 if fprop and wgrad else 7,
        0 if fprop and dgrad else 0.5,
        0,
    ]


def test_use_autocast_during_eval(delayed: Make) -> None:
    # 1.03 is no E4M3 number at scale 1: FP8 makes 1.0 of it, bf16 1.03125.
    for flag, seen in ((False, 1.03125), (True, 1.0)):
        engine = delayed(use_autocast_during_eval=flag, amax_history_len=4)
        layer = engine.convert_linear(nn.Linear(16, 16, bias=False), "layer")
        with torch.no_grad():
            layer.weight.copy_(torch.eye(16))
        before = engine.state_dict()
        with torch.no_grad(), engine.evaluation_context():
            output = layer(torch.full((16, 16), 1.03))
        assert output.unique().tolist() == [seen]
        after = engine.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_scales_take_effect_one_step_later(delayed: Make) -> None:
    # Step 1 casts with scale 1: 1.03 becomes 1.0. Step 2 casts with 448/1.03: 1.03 is then the
    # largest number itself and comes back as it was (to bf16's rounding of the input).
    engine = delayed(amax_history_len=4)
    layer = engine.convert_linear(nn.Linear(16, 16, bias=False), "layer")
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16))
    outputs = []
    for _ in range(2):
        with engine.training_context():
            outputs.append(layer(torch.full((16, 16), 1.03)).unique().tolist())
    assert outputs == [[1.0], [1.03125]]


def test_zero_inf_nan_and_tiny_amaxes(delayed: Make) -> None:
    probe = Probe(delayed(amax_history_len=2))
    probe.step(7)
    probe.step(0)  # zeros: neither history nor scale moves
    assert probe.scale("input") == 64
    assert probe.history("forward")[1][0] == 7
    probe.step(math.nan)  # dropped: as zeros
    assert probe.scale("input") == 64
    assert probe.history("forward")[1][0] == 7
    probe.step(math.inf)  # enters the history and holds the scale while it is there: 2 updates
    assert (probe.scale("input"), probe.history("forward")[1][0]) == (64, math.inf)
    probe.step(14)
    assert probe.scale("input") == 64
    probe.step(14)
    assert probe.scale("input") == 32
    tiny = Probe(delayed(amax_history_len=1))
    tiny.step(1e-37)
    assert tiny.scale("input") == FLOAT32_MAX


def test_forward_is_updated_on_leaving_the_context_backward_after_it(delayed: Make) -> None:
    probe = Probe(delayed(amax_history_len=4))
    output = probe.forward(7)
    assert (probe.scale("input"), probe.scale("grad_output")) == (64, 1)
    output.backward(torch.full_like(output, 7.0))
    assert probe.scale("grad_output") == 1
    assert probe.history("backward")[0] == [7, 0]  # staged
    probe.engine.after_backward()
    assert probe.scale("grad_output") == 8192
    assert probe.history("backward")[0] == [0, 0]


def test_no_update_without_gradients(delayed: Make) -> None:
    probe = Probe(delayed(amax_history_len=4))
    with torch.no_grad():
        probe.forward(7)
    assert probe.scale("input") == 1


def test_every_micro_batch_is_an_update(delayed: Make) -> None:
    probe = Probe(delayed(amax_history_len=8))
    for _ in range(3):  # three micro-batches of one optimizer step
        probe.step(7)
    assert [row[0] for row in probe.history("forward")] == [0, 0, 0, 0, 0, 7, 7, 7]
    assert [row[0] for row in probe.history("backward")] == [0, 0, 0, 0, 0, 1, 1, 1]


def test_a_module_that_did_not_run_keeps_its_history(delayed: Make) -> None:
    engine = delayed(amax_history_len=3)
    probe, idle = Probe(engine), nn.Linear(16, 16, bias=False)
    other = engine.convert_linear(idle, "other")
    with torch.no_grad():
        idle.weight.fill_(1.0)
    with engine.training_context():
        other(torch.full((16, 16), 14.0))
    for _ in range(4):
        probe.step(7)
    state = engine.state_dict()
    assert state["other.forward.amax_history"].tolist() == [[0, 0, 0], [0, 0, 0], [14, 1, 0]]
    assert state["other.forward.scale"].tolist() == [32, 448, 1]
    assert probe.scale("input") == 64


def test_a_module_used_twice_stages_the_larger_amax(delayed: Make) -> None:
    engine = delayed(amax_history_len=4)
    probe = Probe(engine)
    with torch.no_grad():
        probe.layer.weight.fill_(1.0)
    for amaxes in ((7.0, 14.0), (14.0, 7.0)):
        with engine.training_context():
            outputs = [probe.layer(torch.full((16, 16), amax)) for amax in amaxes]
        (outputs[0] * 28 + outputs[1] * 7).sum().backward()
        engine.after_backward()
    # One update a context, not one a call.
    assert probe.history("forward") == [[0, 0, 0], [0, 0, 0], [14, 1, 0], [14, 1, 0]]
    assert probe.history("backward") == [[0, 0], [0, 0], [28, 0], [28, 0]]


def test_current_scaling_keeps_nothing(current: Any) -> None:
    engine = current()
    layer = engine.convert_linear(nn.Linear(16, 16), "layer")
    with engine.training_context():
        output = layer(torch.randn(16, 16))
    output.sum().backward()
    engine.after_backward()
    assert engine.state_dict() == {}
    engine.load_state_dict({})
