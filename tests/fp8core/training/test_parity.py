"""The reference in high precision: what it computes, what it leaves alone, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from fp8core.spec import parse_spec
from fp8core.telemetry import TelemetryWriter, read_records
from fp8core.training.assemble import Assembled
from fp8core.training.outcome import RunResult
from fp8core.training.parity import ParityTracker, parity_report
from fp8core.training.position import Position
from fp8core.training.stopping import StopRequest

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
QUICK: dict[str, Any] = {
    "evaluation": {"every_steps": 0, "max_batches": 1},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
    "telemetry": {"fp8_every_steps": 0},
}


@pytest.mark.parametrize(
    ("parity", "recipe"),
    [
        ({"steps": 4}, {"engine": "amp", "dtype": "bf16"}),
        ({"steps": 2, "dtype": "fp32", "bound": 1.0}, {"engine": "amp", "dtype": "fp32"}),
    ],
)
def test_the_reference_is_that_very_job_and_changes_nothing(
    job: Job, train_here: TrainHere, series: Series, parity: dict[str, Any], recipe: dict[str, Any]
) -> None:
    _, alone = train_here(job(**QUICK))
    _, plain = train_here(job(**QUICK, recipe=recipe))
    _, compared = train_here(job(**QUICK, training={"parity": parity}))
    ours, reference = series(alone, "train/loss"), series(plain, "train/loss")
    # Dropout is on: equal losses mean that seeds, weights and data were those of a run by itself.
    assert series(compared, "train/loss") == ours
    steps = range(1, parity["steps"] + 1)
    assert series(compared, "parity/reference_loss") == {n: reference[n] for n in steps}
    assert series(compared, "parity/gap") == {
        n: pytest.approx((ours[n] - reference[n]) / reference[n]) for n in steps
    }
    told = [record for record, _ in read_records(compared / "telemetry.jsonl")]
    phases = [record.get("phase") for record in told]
    reference_began, job_began = phases.index("reference"), phases.index("converting")
    # Who watches for a standstill sees each step of the reference, and then a count from the start.
    assert [
        (record["step"], record["total_steps"])
        for record in told[reference_began:job_began]
        if record["type"] == "progress"
    ] == [(step, parity["steps"]) for step in steps] + [(0, 6)]
    report = json.loads((compared / "report.json").read_bytes())["parity"]
    # Fewer steps than are averaged over: one gap, of the means of all.
    expected = fmean(ours[n] for n in steps) / fmean(reference[n] for n in steps) - 1
    assert report["worst_smoothed_gap"] == pytest.approx(expected)
    assert report["bound"] == parity.get("bound", 0.02)
    assert report["verdict"] == "within"
    assert report["curve"]["reference_loss"] == [reference[n] for n in steps]
    assert report["compared_steps"] == parity["steps"]


@pytest.mark.slow
def test_the_reference_is_never_repeated(
    job: Job, train_here: TrainHere, series: Series, tmp_path: Path
) -> None:
    spec = job(**QUICK, training={"parity": {"steps": 5}})
    _, whole = train_here(spec)
    workdir, built = tmp_path / "w", []
    stop = StopRequest()

    def stopping(assembled: Assembled) -> None:
        built.append(assembled.learner.engine.name)
        compute = assembled.learner.gradients

        def asked(step: int, *arguments: Any, **options: Any) -> torch.Tensor:
            stop.requested = built[-1] != "amp" and step == 3
            return compute(step, *arguments, **options)

        assembled.learner.gradients = asked  # type: ignore[method-assign]

    train_here(spec, workdir, plant=stopping, stop=stop)
    # Another node has the checkpoint, and nothing else of the workdir.
    (workdir / "parity.json").unlink()
    train_here(spec, workdir, plant=lambda assembled: built.append(assembled.learner.engine.name))
    assert built == ["amp", "emulated", "emulated"]
    reports = [json.loads((w / "report.json").read_bytes())["parity"] for w in (whole, workdir)]
    assert reports[0] == reports[1]
    assert series(workdir, "parity/gap") == series(whole, "parity/gap")


@pytest.mark.slow
def test_a_stop_in_the_main_run_before_any_checkpoint_keeps_the_reference(
    job: Job, train_here: TrainHere, tmp_path: Path
) -> None:
    spec = job(**QUICK, training={"parity": {"steps": 2}})
    workdir, built = tmp_path / "w", []

    def dying(assembled: Assembled) -> None:
        built.append(assembled.learner.engine.name)
        if assembled.learner.engine.name != "amp":
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        train_here(spec, workdir, plant=dying)
    train_here(spec, workdir, plant=lambda assembled: built.append(assembled.learner.engine.name))
    assert built == ["amp", "emulated", "emulated"]
    # For another job in the same workdir it is none.
    other = job(**QUICK, training={"parity": {"steps": 2}, "seed": 3})
    (workdir / "checkpoints").rename(tmp_path / "gone")
    train_here(other, workdir, plant=lambda assembled: built.append(assembled.learner.engine.name))
    assert built[3:] == ["amp", "emulated"]


@pytest.fixture
def tracker(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Compares two curves; gives the report and the events."""

    def compare(
        reference: list[float], own: list[float], bound: float = 0.02
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        spec = parse_spec(
            {
                "model": {"source": "path", "path": "m"},
                "data": {"source": "builtin"},
                "recipe": {"engine": "emulated"},
                "training": {"parity": {"steps": len(reference), "bound": bound}},
            }
        )
        position = Position()
        position.parity = {"reference": reference, "own": [], "beyond_since": None}
        path = tmp_path / "telemetry.jsonl"
        with TelemetryWriter(path) as telemetry:
            tracked = ParityTracker(spec, position, telemetry)
            for step, loss in enumerate(own, start=1):
                tracked.note(step, loss)
        report = parity_report(spec, position)
        assert report is not None
        return report, [record for record, _ in read_records(path)]

    return compare


@pytest.mark.parametrize("sign", [1, -1])
def test_beyond_the_bound_in_either_direction(
    tracker: Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]], sign: int
) -> None:
    reference = [2.0] * 40
    # 6 % for five steps of ten is 3 % smoothed, at step 24; ever less is 2 % and under.
    own = [2.0 * (1 + sign * 0.06 * (20 <= step < 25)) for step in range(1, 41)]
    report, events = tracker(reference, own)
    assert report["verdict"] == "beyond"
    assert report["worst_smoothed_gap"] == pytest.approx(sign * 0.03)
    assert report["worst_step"] == 24
    assert report["mean_gap"] == pytest.approx(sign * 0.06 * 5 / 40)
    (event,) = events
    assert event["kind"] == "parity_beyond"
    assert event["data"]["step"] == 23  # the fourth such step: 2.4 %
    report, events = tracker(reference, own, bound=0.031)
    assert report["verdict"] == "within"


def test_a_step_without_a_loss_is_left_out(
    tracker: Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]],
) -> None:
    own = [2.0] * 30
    own[14] = float("nan")
    report, events = tracker([2.0] * 30, own)
    assert (report["verdict"], report["worst_smoothed_gap"]) == ("within", 0.0)
    assert report["compared_steps"] == 29
    assert not events
    assert tracker([2.0] * 30, [])[0]["verdict"] is None
