"""Runs whose batches are made ahead are those whose batches are made in the step, bit for bit."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.data.batch import Batch
from fp8core.data.batches import TrainingBatches
from fp8core.data.jsonl import JsonlSource
from fp8core.data.records import Record
from fp8core.errors import DataInvalid, Diverged
from fp8core.spec.outcomes import Outcome
from fp8core.telemetry import read_records
from fp8core.training import loop, run
from fp8core.training.assemble import Assembled
from fp8core.training.checkpoint import verify
from fp8core.training.stopping import StopRequest

Job = Callable[..., Path]
TrainHere = Callable[..., Any]
Plant = Callable[[Assembled], None]
FAULTY = "model.layers.1.mlp.gate_proj"


@pytest.fixture(params=["ahead", "in the step"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "in the step":
        make_in_the_step(monkeypatch)
    return str(request.param)


def make_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def plain(source: TrainingBatches, *arguments: Any, **options: Any) -> Iterator[Any]:
        yield source

    monkeypatch.setattr(run, "PrefetchedBatches", plain)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert "batches" not in [thread.name for thread in threading.enumerate()]


def write_rows(path: Path, count: int = 40) -> Path:
    rows = [{"text": f"{index:03d}:" + "x" * (index * 37 % 60)} for index in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def told(workdir: Path) -> list[Any]:
    """Each checkpoint: its state and the digests of its tensors; then the metrics of the losses."""
    found: list[Any] = []
    for folder in sorted((workdir / "checkpoints").iterdir()):
        files = verify(folder, int(folder.name.removeprefix("step-")))["files"]
        state = json.loads((folder / "state.json").read_bytes())
        del state["position"]["seconds"]
        digests = {file["path"]: file["sha256"] for file in files if file["path"] != "state.json"}
        found.append((folder.name, state, digests))
    for record, _ in read_records(workdir / "telemetry.jsonl"):
        if record["type"] == "metrics":
            kept = ("train/loss", "train/grad_norm", "eval/loss")
            found.append([record["step"], {k: record["values"].get(k) for k in kept}])
    return found


def infinite_at(steps: set[int]) -> Plant:
    """An infinity in what a layer gives in FP8."""

    def plant(assembled: Assembled) -> None:
        learner, compute = assembled.learner, assembled.learner.gradients
        now = 0

        def counted(step: int, *arguments: Any, **options: Any) -> Tensor:
            nonlocal now
            now = step
            return compute(step, *arguments, **options)

        def hook(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor | None:
            fp8 = FAULTY in assembled.conversion.converted_layers()
            return output * math.inf if now in steps and module.training and fp8 else None

        learner.gradients = counted  # type: ignore[method-assign]
        learner.model.get_submodule(FAULTY).register_forward_hook(hook)

    return plant


RUNS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "accumulated": ({"training": {"gradient_accumulation": 3}}, set()),
    "to the end of the data": ({"training": {"steps": 500}, "data": {"epochs": 2}}, set()),
    "a step skipped": ({"training": {"on_divergence": "skip_step"}}, {4}),
    "a step repeated": ({"training": {"on_divergence": "fallback_bf16"}}, {4}),
    "prompts": ({"data": {"format": "prompt_completion"}}, set()),
}


@pytest.mark.parametrize(("parts", "bad"), RUNS.values(), ids=RUNS)
def test_a_run_and_all_its_checkpoints_are_the_same(
    job: Job,
    train_here: TrainHere,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    parts: dict[str, Any],
    bad: set[int],
) -> None:
    rows = write_rows(tmp_path / "data.jsonl")
    data = {"source": "jsonl", "path": str(rows), **parts.get("data", {})}
    if data.get("format") == "prompt_completion":
        pairs = [{"prompt": f"{i:03d}:", "completion": "y" * (1 + i % 25)} for i in range(40)]
        rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    spec = job(
        data=data,
        training={"steps": 8, **parts.get("training", {})},
        evaluation={"every_steps": 2, "fraction": 0.2},
        checkpoint={"every_steps": 1, "keep_last": 100},
    )
    result, ahead = train_here(spec, plant=infinite_at(bad))
    make_in_the_step(monkeypatch)
    expected, plain = train_here(spec, plant=infinite_at(bad))
    assert (result.outcome, result.step) == (expected.outcome, expected.step)
    assert result.outcome == Outcome.SUCCEEDED
    found = told(ahead)
    assert found == told(plain)
    assert sum(isinstance(each, tuple) for each in found) == result.step > 5
    if "epochs" in data:
        assert result.step < 500


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    job: Job, train_here: TrainHere, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "data.jsonl")
    spec = job(data={"source": "jsonl", "path": str(rows)}, training={"steps": 9})
    _, whole = train_here(spec)
    stop = StopRequest()
    stopped = tmp_path / "stopped"

    def plant(assembled: Assembled) -> None:
        compute = assembled.learner.gradients

        def asked(step: int, *arguments: Any, **options: Any) -> Tensor:
            if step == 4:
                stop.request()
            return compute(step, *arguments, **options)

        assembled.learner.gradients = asked  # type: ignore[method-assign]

    result, _ = train_here(spec, stopped, plant=plant, stop=stop)
    assert (result.outcome, result.step) == (Outcome.STOPPED, 4)
    result, _ = train_here(spec, stopped)
    assert (result.outcome, result.step) == (Outcome.SUCCEEDED, 9)
    last = [each for each in told(whole) if isinstance(each, tuple)][-1]
    assert [each for each in told(stopped) if isinstance(each, tuple)][-1] == last


def test_bad_data_ends_the_run_in_the_step_whose_batch_it_is(
    job: Job,
    train_here: TrainHere,
    tmp_path: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line that changes when all were checked. Of its documents 64 are encoded together, behind
    the first: those of the bad one begin with the 66th, of the fifth step."""
    rows = write_rows(tmp_path / "data.jsonl", 200)
    steps: list[int] = []
    readers: set[str] = set()
    read = JsonlSource.records

    def records(source: JsonlSource, numbers: Sequence[int]) -> list[Record]:
        readers.add(threading.current_thread().name)
        return read(source, numbers)

    monkeypatch.setattr(JsonlSource, "records", records)

    def plant(assembled: Assembled) -> None:
        lines = rows.read_bytes().splitlines(keepends=True)
        lines[99] = b"?" * (len(lines[99]) - 1) + b"\n"
        rows.write_bytes(b"".join(lines))
        compute = assembled.learner.gradients

        def counted(step: int, *arguments: Any, **options: Any) -> Tensor:
            steps.append(step)
            return compute(step, *arguments, **options)

        assembled.learner.gradients = counted  # type: ignore[method-assign]

    spec = job(
        data={"source": "jsonl", "path": str(rows), "packing": False, "shuffle": False},
        training={"steps": 12, "batch_size": 16},
        evaluation={"every_steps": 0, "fraction": 0.0},
        checkpoint={"every_steps": 1, "keep_last": 100},
    )
    workdir = tmp_path / "work"
    with pytest.raises(DataInvalid, match="line 100: the line changed since training began"):
        train_here(spec, workdir, plant=plant)
    assert steps == [1, 2, 3, 4]
    assert readers == {"batches" if how == "ahead" else "MainThread"}
    saved = [each[0] for each in told(workdir) if isinstance(each, tuple)]
    assert saved == [f"step-{step:08d}" for step in steps]


def test_a_run_that_fails_ends_the_thread(job: Job, train_here: TrainHere, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "data.jsonl")
    seen: list[bool] = []

    def plant(assembled: Assembled) -> None:
        infinite_at({3})(assembled)
        compute = assembled.learner.gradients

        def counted(step: int, *arguments: Any, **options: Any) -> Tensor:
            seen.append("batches" in [thread.name for thread in threading.enumerate()])
            return compute(step, *arguments, **options)

        assembled.learner.gradients = counted  # type: ignore[method-assign]

    with pytest.raises(Diverged, match="step 3"):
        train_here(job(data={"source": "jsonl", "path": str(rows)}), plant=plant)
    assert seen
    assert all(seen)


def test_the_time_of_a_step_begins_with_the_wait_for_its_batches(
    job: Job, train_here: TrainHere, series: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a clock that stands still but where data is waited for: a second for each batch."""

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    class Slow:
        def __init__(self, source: TrainingBatches) -> None:
            self._source = source
            self.state_dict = source.state_dict

        def __next__(self) -> Batch:
            clock.now += 1.0
            return next(self._source)

    @contextmanager
    def slow(source: TrainingBatches, *arguments: Any, **options: Any) -> Iterator[Slow]:
        yield Slow(source)

    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(run, "PrefetchedBatches", slow)
    spec = job(training={"steps": 4, "gradient_accumulation": 3}, telemetry={"log_every_steps": 1})
    _, workdir = train_here(spec)
    assert series(workdir, "perf/step_seconds") == dict.fromkeys(range(1, 5), 3.0)
