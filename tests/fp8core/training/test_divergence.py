"""A loss that is not finite: where it began, and what each ``on_divergence`` makes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp8core.engines.emulated_layers import EmulatedLinear
from fp8core.errors import Diverged
from fp8core.telemetry import read_records
from fp8core.training.assemble import Assembled
from fp8core.training.late_metrics import LateMetrics, StepFigures
from fp8core.training.learner import Learner
from fp8core.training.outcome import RunResult
from fp8core.training.stopping import StopRequest
from tests.fp8core.training.plants import stop_in_step

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
Plant = Callable[[Assembled], None]
FAULTY = "model.layers.1.mlp.gate_proj"
QUICK: dict[str, Any] = {
    "evaluation": {"every_steps": 0, "max_batches": 1},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
    "telemetry": {"fp8_every_steps": 0},
}


class Fault:
    """Puts an infinity into what a layer gives in chosen steps. The probe counts as step 0."""

    def __init__(
        self,
        *,
        steps: set[int],
        name: str = FAULTY,
        where: str = "output",
        applies: Callable[[nn.Module], bool] = lambda module: True,
    ) -> None:
        self._steps, self._name, self._where, self._applies = steps, name, where, applies
        self._learner: Learner | None = None

    def __call__(self, assembled: Assembled) -> None:
        self._learner = learner = assembled.learner
        step = 0
        compute = learner.gradients

        def counted(number: int, *arguments: Any, **options: Any) -> torch.Tensor:
            nonlocal step
            step = number
            return compute(number, *arguments, **options)

        learner.gradients = counted  # type: ignore[method-assign]

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
            # Hooks stay with a layer that is put back, so the module tells which it is now.
            if not module.training or step not in self._steps or not self._applies(module):
                return None
            if self._where == "gradient":
                output.register_hook(lambda grad: grad.index_fill(-1, torch.tensor([0]), math.inf))
                return None
            return output.index_fill(-1, torch.tensor([0]), math.inf)

        learner.model.get_submodule(self._name).register_forward_hook(hook)


def events(workdir: Path, kind: str) -> list[dict[str, Any]]:
    records = [record for record, _ in read_records(workdir / "telemetry.jsonl")]
    return [r for r in records if r["type"] == "event" and r["kind"] == kind]


@pytest.mark.parametrize(
    ("where", "name", "tensor"),
    [
        ("output", FAULTY, "the output"),
        # Not in a converted layer: the cast to FP8 saturates, and what follows is finite again.
        ("gradient", "lm_head", "the gradient of the input"),
    ],
)
def test_fail_names_step_and_layer(
    job: Job, train_here: TrainHere, tmp_path: Path, where: str, name: str, tensor: str
) -> None:
    spec = job(**QUICK)
    with pytest.raises(Diverged) as caught:
        train_here(spec, tmp_path / "w", plant=Fault(steps={3}, where=where, name=name))
    assert "of step 3" in caught.value.message
    assert f"{tensor} of {name} (" in caught.value.message
    (event,) = events(tmp_path / "w", "diverged")
    assert event["data"]["step"] == 3
    assert event["data"]["layer"] == name
    assert event["data"]["tensor"] == tensor


def test_the_micro_batch_is_named_and_weights_at_fault(job: Job, train_here: TrainHere) -> None:
    def spike(assembled: Assembled) -> None:
        learner, compute = assembled.learner, assembled.learner.gradients

        def spoiled(step: int, *arguments: Any, **options: Any) -> torch.Tensor:
            if step == 2:
                layer = learner.model.get_submodule("model.layers.0.self_attn.o_proj")
                with torch.no_grad():
                    layer.weight[3, 5] = math.inf  # type: ignore[index, operator]
            return compute(step, *arguments, **options)

        learner.gradients = spoiled  # type: ignore[method-assign]

    with pytest.raises(Diverged) as caught:
        train_here(job(**QUICK, recipe={"engine": "amp", "dtype": "bf16"}), plant=spike)
    told = "the parameter weight of model.layers.0.self_attn.o_proj (1 of 1024 values"
    assert told in caught.value.message


def test_a_learning_rate_that_is_far_too_high_is_told_as_divergence(
    job: Job, train_here: TrainHere
) -> None:
    training = {"steps": 20, "optimizer": {"lr": 1000.0}, "max_grad_norm": None}
    recipe = {"engine": "amp", "dtype": "fp16"}
    # fp16 overflows for certain; its loss scale can help gradients, not the loss itself.
    with pytest.raises(Diverged, match="the first tensor that is not finite is"):
        train_here(job(**QUICK, recipe=recipe, training=training))


def test_a_skipped_step_changes_nothing(
    job: Job, train_here: TrainHere, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[str, dict[str, torch.Tensor]] = {}

    def remembering(assembled: Assembled) -> None:
        Fault(steps={3, 4})(assembled)
        learner, compute = assembled.learner, assembled.learner.gradients

        def kept(step: int, *arguments: Any, **options: Any) -> torch.Tensor:
            name = f"before {step}"
            if name not in before:
                state = {f"model/{k}": v for k, v in learner.model.state_dict().items()}
                state |= learner.optimizer.state_tensors() | dict(learner.engine.state_dict())
                before[name] = {key: value.clone() for key, value in state.items()}
            return compute(step, *arguments, **options)

        learner.gradients = kept  # type: ignore[method-assign]

    spec = job(**QUICK, training={"on_divergence": "skip_step"})
    result, workdir = train_here(spec, plant=remembering)
    assert result.step == 6
    skipped = events(workdir, "step_skipped")
    assert [e["data"]["step"] for e in skipped] == [3, 4]
    assert [e["data"]["in_a_row"] for e in skipped] == [1, 2]
    assert {e["data"]["layer"] for e in skipped} == {FAULTY}
    for key, value in before["before 3"].items():
        assert torch.equal(value, before["before 5"][key]), key
    assert not torch.equal(
        before["before 5"]["model/lm_head.weight"], before["before 6"]["model/lm_head.weight"]
    )
    # The infinity goes into an FP8 cast, which saturates: what tells of it is the gradient.
    assert not math.isfinite(series(workdir, "train/grad_norm")[3])
    report = json.loads((workdir / "report.json").read_bytes())
    assert report["divergence"]["skipped_steps"] == 2


def test_skips_in_a_row_are_bounded_also_across_a_resume(
    job: Job, train_here: TrainHere, tmp_path: Path
) -> None:
    wanted = {"action": "skip_step", "max_consecutive": 3}
    spec = job(
        **{**QUICK, "checkpoint": {"every_steps": 3}},
        training={"steps": 9, "on_divergence": wanted},
    )
    stop = StopRequest()

    def stopping(assembled: Assembled) -> None:
        Fault(steps={2, 3, 4, 5, 6})(assembled)
        stop_in_step(3, stop)(assembled)

    workdir = tmp_path / "w"
    train_here(spec, workdir, plant=stopping, stop=stop)
    with pytest.raises(Diverged, match=r"of step 5 .*the 3 steps before it were skipped already"):
        train_here(spec, workdir, plant=Fault(steps={2, 3, 4, 5, 6}))


def test_fallback_takes_the_layer_at_fault_and_survives_a_resume(
    job: Job, train_here: TrainHere, tmp_path: Path, series: Series
) -> None:
    """The fault needs FP8: without the layer's conversion there is none."""

    def fault() -> Fault:
        only_fp8: Callable[[nn.Module], bool] = lambda m: isinstance(m, EmulatedLinear)  # noqa: E731
        return Fault(steps={3, 4, 5, 6}, applies=only_fp8)

    parts = {
        **QUICK,
        "checkpoint": {"every_steps": 0},
        "training": {"on_divergence": "fallback_bf16"},
    }
    spec = job(**parts)
    _, whole = train_here(spec, tmp_path / "whole", plant=fault())
    (event,) = events(whole, "fallback_bf16")
    assert event["data"]["step"] == 3
    assert event["data"]["layers"] == [FAULTY]
    assert event["data"]["remaining"] == 18
    assert all(math.isfinite(loss) for loss in series(whole, "train/loss").values())
    rows = {row["name"]: row for row in json.loads((whole / "conversion.json").read_bytes())}
    assert rows[FAULTY]["to"] is None
    assert rows[FAULTY]["reason"].startswith("put back into high precision at step 3: the gra")
    assert rows["model.layers.0.mlp.gate_proj"]["to"] == "EmulatedLinear"
    records = [r for r, _ in read_records(whole / "telemetry.jsonl") if r["type"] == "artifact"]
    assert [r["path"] for r in records if r["kind"] == "conversion"] == [
        "conversion.json",
        "conversion-00000003.json",
    ]

    stop = StopRequest()

    def stopping(assembled: Assembled) -> None:
        fault()(assembled)
        stop_in_step(4, stop)(assembled)

    parted = tmp_path / "parted"
    train_here(spec, parted, plant=stopping, stop=stop)
    train_here(spec, parted, plant=fault())
    assert len(events(parted, "fallback_bf16")) == 1, "the choice was not kept"
    assert series(parted, "train/loss") == series(whole, "train/loss")
    final = [load_file(w / "model" / "model.safetensors") for w in (whole, parted)]
    assert all(torch.equal(final[0][key], final[1][key]) for key in final[0])


def test_fallback_goes_on_to_all_layers_and_then_fails(job: Job, train_here: TrainHere) -> None:
    spec = job(**QUICK, training={"on_divergence": "fallback_bf16"})
    told: list[Assembled] = []

    def always(assembled: Assembled) -> None:
        told.append(assembled)
        Fault(steps={2})(assembled)

    with pytest.raises(Diverged, match="every layer is in high precision already"):
        train_here(spec, plant=always)
    assert told[0].conversion.converted == []
    assert not any(isinstance(m, EmulatedLinear) for m in told[0].learner.model.modules())


@pytest.fixture
def late_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures arrive one step late, as they do from a GPU."""

    def push(self: LateMetrics, step: int, tensors: Any, numbers: Any) -> StepFigures | None:
        settled = self.flush()
        self.__dict__["_held"] = StepFigures(
            step, {k: float(v) for k, v in tensors.items()} | numbers
        )
        return settled

    monkeypatch.setattr(LateMetrics, "push", push)
    monkeypatch.setattr(LateMetrics, "flush", lambda self: self.__dict__.pop("_held", None))


@pytest.mark.usefixtures("late_figures")
def test_late_figures_report_no_speed_of_zero(
    job: Job, train_here: TrainHere, series: Series, tmp_path: Path
) -> None:
    train_here(job(**QUICK), tmp_path / "run")
    speeds = series(tmp_path / "run", "perf/tokens_per_second")
    losses = series(tmp_path / "run", "train/loss")
    assert len(speeds) == len(losses) > 1
    assert all(speed > 0 for speed in speeds.values())


@pytest.mark.usefixtures("late_figures")
def test_figures_that_arrive_late_find_the_weights_of_before(
    job: Job, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, here: figures one step late, and a flag that holds the optimizer back."""
    weights: dict[int, torch.Tensor] = {}

    def late(assembled: Assembled) -> None:
        Fault(steps={3})(assembled)
        learner, compute = assembled.learner, assembled.learner.gradients

        def kept(step: int, *arguments: Any, **options: Any) -> torch.Tensor:
            weights.setdefault(step, learner.model.lm_head.weight.detach().clone())  # type: ignore[union-attr, operator]
            return compute(step, *arguments, **options)

        learner.gradients = kept  # type: ignore[method-assign]

    from fp8core.training.divergence import DivergenceGuard

    build = DivergenceGuard.__init__

    def as_on_a_gpu(self: DivergenceGuard, *arguments: Any) -> None:
        build(self, *arguments)
        self.late = True

    monkeypatch.setattr(DivergenceGuard, "__init__", as_on_a_gpu)
    with pytest.raises(Diverged) as caught:
        train_here(job(**QUICK), plant=late)
    assert "of step 3" in caught.value.message
    assert f"the output of {FAULTY}" in caught.value.message
    assert not torch.equal(weights[2], weights[3])
    assert torch.equal(weights[3], weights[4]), "the bad step was taken"
