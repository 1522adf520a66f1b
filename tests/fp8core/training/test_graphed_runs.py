"""Runs whose steps are replayed: with a graph's stand-in on a CPU, a tape of operations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core import engines
from fp8core.engines.te_health import HealthRecorder, cast_rules
from fp8core.spec import AmpRecipe
from fp8core.spec.recipe import TEDelayed
from fp8core.training.assemble import Assembled
from fp8core.training.outcome import RunResult
from fp8core.training.step_graphs import StepGraphs
from tests.fp8core.fusion.test_runs import FusingAmp
from tests.fp8core.training.graphed import OFF, RUN, graphs

__all__ = ["graphs"]  # fixtures

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
Telemetry = Callable[[Path], list[dict[str, Any]]]


def events(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get("kind") == kind]


def report_of(workdir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((workdir / "report.json").read_bytes())["cuda_graphs"]
    return found


def test_a_run_that_replays_is_the_run_that_does_not(
    graphs: list[StepGraphs],
    job: Job,
    train_here: TrainHere,
    series: Series,
    telemetry: Telemetry,
) -> None:
    """Schedule, clipping, evaluation, health and documents of all lengths: the same to the bit."""
    _, plain = train_here(job(**OFF))
    _, replayed = train_here(job(**RUN))
    for name in ("train/loss", "train/grad_norm", "train/lr", "eval/loss"):
        expected = series(plain, name)
        assert expected
        assert series(replayed, name) == expected, name
    # Behind three batches.
    assert report_of(replayed) == {"from_step": 4, "replayed_steps": 21, "reason": None}
    (event,) = events(telemetry(replayed), "step_graphed")
    assert event["data"] == {"step": 4}
    off = report_of(plain)
    assert (off["replayed_steps"], off["reason"]) == (0, "training.cuda_graphs is off")
    assert not events(telemetry(plain), "step_graphed")
    assert not events(telemetry(plain), "step_not_graphed")


class WatchedAmp(FusingAmp):
    """Counts what casts to FP8 would do to the head's tensors."""

    records_health = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._scale = torch.tensor(30.0)
        self._recorder = HealthRecorder(self._scales, cast_rules(TEDelayed()), self.device)
        self._head: nn.Module | None = None

    def _scales(self) -> dict[tuple[str, str], Tensor]:
        return {("head", tensor): self._scale for tensor in ("input", "weight", "grad_output")}

    def prepare(self, model: nn.Module) -> None:
        self._head = model.lm_head

    @contextmanager
    def training_context(self, *arguments: Any) -> Iterator[None]:
        self._recorder.before_forward()
        with super().training_context(*arguments):
            yield

    def record_health(self, enabled: bool) -> None:
        assert self._head is not None
        self._recorder.record(enabled, {"head": self._head})

    def health_later(self) -> Callable[[], dict[str, float]]:
        read = self._recorder.read_later({})
        assert read is not None
        self._scale.add_(10.0)  # as delayed scaling has it, the next casts go by another
        return read

    def captured_health(self) -> Any:
        return self._recorder.recorded()

    def replayed(self, health: Any = None) -> None:
        if health is not None:
            self._recorder.replayed(health)


def test_recorded_steps_are_replayed_too(
    graphs: list[StepGraphs],
    job: Job,
    train_here: TrainHere,
    series: Series,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their figures are those of steps that were not: of their own tensors, and of their scales."""
    fp32 = AmpRecipe(engine="amp", dtype="fp32")
    monkeypatch.setattr(engines, "create", lambda recipe, device: WatchedAmp(fp32, device))
    _, plain = train_here(job(**OFF))
    _, replayed = train_here(job(**RUN))
    for tensor in ("input", "weight", "grad_output"):
        for figure in ("amax", "scale", "saturated", "underflow"):
            name = f"fp8/head/{tensor}/{figure}"
            expected = series(plain, name)
            assert expected.keys() == {7, 14, 21}
            assert series(replayed, name) == expected, name
        assert len(set(series(plain, f"fp8/head/{tensor}/amax").values())) == 3
    assert series(plain, "fp8/head/input/scale") == {7: 30.0, 14: 40.0, 21: 50.0}
    assert series(replayed, "train/loss") == series(plain, "train/loss")
    # Behind three batches, and behind the first that was recorded.
    assert report_of(replayed) == {"from_step": 4, "replayed_steps": 20, "reason": None}


def test_a_capture_that_fails_costs_the_run_nothing(
    graphs: list[StepGraphs],
    job: Job,
    train_here: TrainHere,
    series: Series,
    telemetry: Telemetry,
) -> None:
    def plant(assembled: Assembled) -> None:
        learner = assembled.learner
        computed, compute = 0, learner.forward_backward

        def failing(*arguments: Any, **options: Any) -> Tensor:
            nonlocal computed
            computed += 1
            loss = compute(*arguments, **options)
            if computed == 4:
                raise RuntimeError("operation not permitted when stream is capturing")
            return loss

        learner.forward_backward = failing  # type: ignore[method-assign]

    _, plain = train_here(job(**OFF))
    _, failed = train_here(job(**RUN), plant=plant)
    assert series(failed, "train/loss") == series(plain, "train/loss")
    found = report_of(failed)
    assert found["replayed_steps"] == 0
    assert "operation not permitted" in found["reason"]
    (event,) = events(telemetry(failed), "step_not_graphed")
    assert event["data"] == {"step": 4, "reason": found["reason"]}
