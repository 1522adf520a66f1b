"""Every option of training.precision has its effect, by dtype and by bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp8core.training.precision import set_gradient_dtype

FP32, BF16 = torch.float32, torch.bfloat16
BF16_AMP = {"engine": "amp", "dtype": "bf16"}
EMULATED = {"engine": "emulated", "amax_history_len": 4}


@pytest.mark.parametrize("recipe", [BF16_AMP, EMULATED], ids=["amp", "emulated"])
@pytest.mark.parametrize(
    ("precision", "weights", "states", "master"),
    [
        ({}, FP32, FP32, False),
        ("throughput", BF16, BF16, False),
        ({"weights": "bf16"}, BF16, FP32, False),
        ({"weights": "bf16", "master_weights": "fp32"}, BF16, FP32, True),
        ({"optimizer_states": "bf16"}, FP32, BF16, False),
        ({"gradients": "bf16"}, FP32, FP32, False),
    ],
    ids=["method", "throughput", "weights", "master", "states", "gradients"],
)
def test_what_is_stored_has_the_format_that_was_asked_for(
    job: Callable[..., Path],
    train: Callable[..., Path],
    series: Callable[[Path, str], dict[int, float]],
    recipe: dict[str, Any],
    precision: Any,
    weights: torch.dtype,
    states: torch.dtype,
    master: bool,
) -> None:
    workdir = train(job(recipe=recipe, training={"steps": 12, "precision": precision}))
    losses = series(workdir, "eval/loss")
    assert losses[12] < losses[3]
    saved = workdir / "checkpoints/step-00000012"
    model = load_file(saved / "model.safetensors")
    assert {t.dtype for t in model.values()} == {weights}
    assert {t.dtype for t in load_file(workdir / "model/model.safetensors").values()} == {weights}
    optimizer = load_file(saved / "optimizer.safetensors")
    moments = [t for name, t in optimizer.items() if "/exp_avg" in name]
    assert {t.dtype for t in moments} == {states}
    count = sum(t.numel() for t in model.values())
    assert sum(t.nbytes for t in moments) == 2 * count * states.itemsize
    masters = {k: t for k, t in optimizer.items() if k.endswith("/master")}
    assert len(masters) == (len(model) if master else 0)
    for name, tensor in masters.items():
        assert tensor.dtype == FP32
        assert torch.equal(tensor.bfloat16(), model[name.removesuffix("/master")])


@pytest.mark.parametrize("weight", [FP32, BF16])
@pytest.mark.parametrize("gradient", [FP32, BF16])
def test_gradients_are_kept_and_accumulated_in_their_format(
    weight: torch.dtype, gradient: torch.dtype
) -> None:
    model = nn.Linear(16, 16, bias=False).to(weight)
    nn.init.zeros_(model.weight)
    set_gradient_dtype(model, gradient)
    one = torch.ones(1, 16, dtype=weight)
    for share in (256.0, 1.0):
        (model(one) * share).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == gradient
    # 257 is a number of fp32 and none of bf16.
    assert model.weight.grad[0, 0].item() == (257.0 if gradient == FP32 else 256.0)


@pytest.mark.parametrize("recipe", [BF16_AMP, EMULATED], ids=["amp", "emulated"])
@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
def test_the_loop_steps_with_gradients_of_their_format(
    job: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: dict[str, Any],
    gradients: str,
) -> None:
    from fp8core.spec import parse_spec
    from fp8core.telemetry import TelemetryWriter
    from fp8core.training.build import Places
    from fp8core.training.optimizer import AdamW
    from fp8core.training.run import Run
    from fp8core.training.stopping import StopRequest
    from fp8core.training.workdir import Workdir

    seen: set[torch.dtype] = set()
    step = AdamW.step

    def watched(self: AdamW, closure: Any = None, **options: Any) -> None:
        for group in self.param_groups:
            seen.update(p.grad.dtype for p in group["params"])
        step(self, closure, **options)

    monkeypatch.setattr(AdamW, "step", watched)
    precision = {"weights": "bf16", "gradients": gradients}
    spec = parse_spec(
        job(recipe=recipe, training={"steps": 1, "precision": precision}).read_bytes()
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with Workdir(tmp_path / "w") as workdir, TelemetryWriter(workdir.telemetry) as telemetry:
            Run(spec, workdir, telemetry, StopRequest(), places=Places()).execute()
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert seen == {FP32 if gradients == "fp32" else BF16}
