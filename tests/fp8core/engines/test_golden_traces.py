"""The emulated engine replays, on a CPU, what Transformer Engine did on an H200.

``tests/golden/record_te.py`` made the traces. Amaxes, histories and scales must be equal bit for
bit; outputs and gradients within the rounding that a different order of summation can cause.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fp8core.engines.emulated import EmulatedEngine
from fp8core.numerics.casts import E4M3, E5M2
from fp8core.numerics.delayed_scaling import AmaxHistories, DelayedScaling
from fp8core.spec.recipe import EmulatedDelayed

GOLDEN = Path(__file__).parents[2] / "golden"
META: dict[str, Any] = json.loads((GOLDEN / "te_meta.json").read_text())
SETTINGS = {setting["key"]: setting for setting in META["settings"]}
WITH_TENSORS = [key for key, setting in SETTINGS.items() if setting["tensors"]]
LAYERS = {"mlp": ("up", "down"), "attention": ("query", "key", "value", "output")}
CPU = torch.device("cpu")


@cache
def traces(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"te_{name}.safetensors")


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32))


def test_the_traces_hold_what_they_promise() -> None:
    assert len(SETTINGS) == 48
    assert len(WITH_TENSORS) == 3
    assert META["device"] == "NVIDIA H200"
    size = sum(path.stat().st_size for path in GOLDEN.iterdir())
    assert size < 5_000_000
    fields = ("model", "amax_history_len", "amax_compute_algo", "margin", "fp8_format")
    found = [tuple(setting[field] for field in fields) for setting in SETTINGS.values()]
    histories, algorithms = (1, 4, 16), ("max", "most_recent")
    every = itertools.product(LAYERS, histories, algorithms, (0, 2), ("HYBRID", "E4M3"))
    assert sorted(found) == sorted(every)
    assert {SETTINGS[key]["model"] for key in WITH_TENSORS} == set(LAYERS)


@pytest.mark.parametrize("key", SETTINGS)
def test_a_zero_an_infinity_and_an_outlier_are_among_the_inputs(key: str) -> None:
    for layer in ("up",) if SETTINGS[key]["model"] == "mlp" else ("query", "key", "value"):
        amaxes = traces("scales")[f"{key}/{layer}/fwd/amax"][:, 0]
        assert len(amaxes) == META["steps"] == 20
        zero, infinity, outlier = (META[f"{kind}_step"] for kind in ("zero", "inf", "outlier"))
        assert amaxes[zero] == 0
        assert amaxes[infinity] == torch.inf
        others = [a for step, a in enumerate(amaxes) if step not in (zero, infinity, outlier)]
        assert amaxes[outlier] > 200 * max(others)


@pytest.mark.parametrize("key", SETTINGS)
def test_histories_and_scales_follow_from_the_amaxes_bit_for_bit(key: str) -> None:
    setting = SETTINGS[key]
    backward = E5M2 if setting["fp8_format"] == "HYBRID" else E4M3
    for layer in LAYERS[setting["model"]]:
        for direction, columns, fmt in (("fwd", 3, E4M3), ("bwd", 2, backward)):
            prefix = f"{key}/{layer}/{direction}"
            amaxes = traces("scales")[f"{prefix}/amax"]
            scales = traces("scales")[f"{prefix}/scale"]
            histories = AmaxHistories(
                DelayedScaling(
                    fp8_max=fmt.max,
                    margin=setting["margin"],
                    amax_history_len=setting["amax_history_len"],
                    amax_compute_algo=setting["amax_compute_algo"],
                    interval=1,
                ),
                CPU,
            )
            histories.add(columns)
            for step in range(META["steps"]):
                for column in range(columns):
                    histories.record(column, amaxes[step, column])
                histories.update()
                ours = histories.read(0, columns).scale
                assert same_bits(ours, scales[step]), (prefix, step, ours, scales[step])
            ours = histories.read(0, columns).amax_history
            assert same_bits(ours, traces("scales")[f"{prefix}/history"]), prefix


def close_in_rounding(ours: Tensor, theirs: Tensor, terms: int) -> None:
    """Equal but for the order in which ``terms`` exact products are summed in fp32.

    Both sides sum the same products and round once to bf16 (2^-8 relative, half a unit in the last
    place each). They sum in different orders, and without split accumulation a tensor core keeps
    only about 14 bits while it sums FP8 products (DeepSeek-V3, arXiv 2412.19437, section 3.3.2):
    2^-13 of a typical sum of magnitudes, for which the largest element over sqrt(terms) stands.
    Most sums are not near the middle between two bf16 numbers, and so come out the same.
    """
    finite = torch.isfinite(theirs.float())
    assert torch.equal(torch.isfinite(ours.float()), finite)
    assert torch.equal(torch.isnan(ours.float()), torch.isnan(theirs.float()))
    ours, theirs = ours.float()[finite], theirs.float()[finite]
    if theirs.numel() == 0:
        return
    bound = theirs.abs() * 2.0**-7 + theirs.abs().max() * terms * 2.0**-13 / terms**0.5
    excess = ((ours - theirs).abs() - bound).max().item()
    assert excess <= 0, excess
    assert (ours == theirs).float().mean().item() > 0.9


@pytest.mark.parametrize("key", WITH_TENSORS)
def test_each_layer_and_step_is_reproduced_teacher_forced(key: str) -> None:
    setting = SETTINGS[key]
    tensors = traces("tensors")
    recipe = EmulatedDelayed(
        engine="emulated",
        scaling="delayed",
        margin=setting["margin"],
        fp8_format=setting["fp8_format"],
        amax_history_len=setting["amax_history_len"],
        amax_compute_algo=setting["amax_compute_algo"],
    )
    for layer in LAYERS[setting["model"]]:
        engine = EmulatedEngine(recipe, CPU)
        first = f"{key}/0/{layer}"
        weight = tensors[f"{first}/weight"]
        bias = tensors.get(f"{first}/bias")
        linear = nn.Linear(*reversed(weight.shape), bias=bias is not None, dtype=weight.dtype)
        module = engine.convert_linear(linear, layer)
        for step in range(META["steps"]):
            prefix = f"{key}/{step}/{layer}"
            with torch.no_grad():
                linear.weight.copy_(tensors[f"{prefix}/weight"])
                if bias is not None:
                    linear.bias.copy_(tensors[f"{prefix}/bias"])
            linear.weight.grad = None
            x = tensors[f"{prefix}/input"].clone().requires_grad_()
            with engine.training_context():
                output = module(x)
            output.backward(tensors[f"{prefix}/grad_output"])
            engine.after_backward()
            for direction, name in (("fwd", "forward"), ("bwd", "backward")):
                ours = engine.state_dict()[f"{layer}.{name}.scale"]
                theirs = traces("scales")[f"{key}/{layer}/{direction}/scale"][step]
                assert same_bits(ours, theirs), (layer, step, direction, ours, theirs)
                history = engine.state_dict()[f"{layer}.{name}.amax_history"]
                staged = traces("scales")[f"{key}/{layer}/{direction}/amax"][step]
                if len(history) > 1:
                    # A tensor of zeros leaves its history as it was.
                    ran = staged != 0
                    assert same_bits(history[-1][ran], staged[ran]), (layer, step, direction)
                if step == META["steps"] - 1:
                    last = traces("scales")[f"{key}/{layer}/{direction}/history"]
                    assert same_bits(history, last), (layer, direction)
            close_in_rounding(output, tensors[f"{prefix}/output"], weight.shape[1])
            assert linear.weight.grad is not None
            close_in_rounding(linear.weight.grad, tensors[f"{prefix}/grad_weight"], len(x))
            if f"{prefix}/grad_input" in tensors:
                assert x.grad is not None
                close_in_rounding(x.grad, tensors[f"{prefix}/grad_input"], weight.shape[0])
