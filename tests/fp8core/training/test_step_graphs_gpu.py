"""Steps replayed as CUDA graphs on a GPU: what a tape shows on a CPU holds for graphs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fp8core.telemetry import read_records
from fp8core.training.assemble import Assembled
from fp8core.training.late_metrics import LateMetrics
from fp8core.training.outcome import RunResult

pytestmark = pytest.mark.gpu

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]

RECIPES: dict[str, dict[str, Any]] = {
    "amp": {"engine": "amp", "dtype": "bf16"},
    "delayed": {"engine": "te", "amax_history_len": 4},
    "current": {"engine": "te", "scaling": "current"},
    "block": {"engine": "te", "scaling": "block"},
}
RUN: dict[str, Any] = {
    "model": {
        "config": {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
            "attention_dropout": 0.0,
        }
    },
    "conversion": {"small_gemm": "off"},
    "resources": {"device": "cuda"},
    "training": {"steps": 40, "batch_size": 2, "sequence_length": 256},
    "evaluation": {"every_steps": 15, "max_batches": 2},
    "checkpoint": {"every_steps": 20, "keep_best": 0, "keep_last": 5},
    "telemetry": {"fp8_every_steps": 13},
}
STATE = "checkpoints/step-00000040/engine.safetensors"
WITHOUT = {**RUN, "training": {**RUN["training"], "cuda_graphs": "off"}}


def graphs_of(workdir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((workdir / "report.json").read_bytes())["cuda_graphs"]
    return found


def events(workdir: Path, kind: str) -> list[dict[str, Any]]:
    return [r for r, _ in read_records(workdir / "telemetry.jsonl") if r.get("kind") == kind]


def limited_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the host of the test is."""
    monkeypatch.setattr(LateMetrics, "waited_for_host", 99, raising=False)
    monkeypatch.setattr(LateMetrics, "__setattr__", _but_for_what_is_waited)


def _but_for_what_is_waited(late: LateMetrics, name: str, value: Any) -> None:
    if name != "waited_for_host":
        object.__setattr__(late, name, value)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_replays_is_the_run_that_does_not(
    recipe: str,
    documents: bool,
    job: Job,
    train_here: TrainHere,
    series: Series,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited_by_host(monkeypatch)
    data: dict[str, Any] = {"source": "builtin"}
    if documents:
        drawn = random.Random(0)
        words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
        lines = [" ".join(drawn.choices(words, k=drawn.randint(3, 60))) for _ in range(600)]
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        data = {"source": "jsonl", "path": str(path)}
    own = {"recipe": RECIPES[recipe], "data": data}
    _, plain = train_here(job(**WITHOUT, **own))
    _, again = train_here(job(**WITHOUT, **own))
    _, replayed = train_here(job(**RUN, **own))
    assert graphs_of(plain)["replayed_steps"] == 0
    found = graphs_of(replayed)
    assert found["reason"] is None
    assert found["replayed_steps"] >= 25
    assert len(events(replayed, "step_graphed")) == 1
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        expected, others = series(plain, name), series(again, name)
        noise = max(abs(others[step] - value) for step, value in expected.items())
        of_replayed = series(replayed, name)
        assert of_replayed.keys() == expected.keys()
        apart = max(abs(of_replayed[step] - value) for step, value in expected.items())
        print(f"{recipe} {documents} {name}: apart {apart:.3g}, two runs without {noise:.3g}")
        assert apart <= max(4 * noise, 2e-3 * max(expected.values())), name
    if recipe != "amp":
        states = [load_file(w / STATE) for w in (plain, replayed)]
        assert states[0].keys() == states[1].keys()
        counts = [name for name in states[0] if name.startswith("updates/")]
        assert len(counts) == 2
        for name in counts:
            assert torch.equal(states[0][name], states[1][name]), name


def health_of(workdir: Path) -> dict[tuple[int, str], float]:
    records = [r for r, _ in read_records(workdir / "telemetry.jsonl") if r["type"] == "metrics"]
    return {
        (record["step"], name): value
        for record in records
        for name, value in record["values"].items()
        if name.startswith("fp8/")
    }


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_health_comes_out_of_replayed_steps(
    recipe: str, job: Job, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited_by_host(monkeypatch)
    own = {"recipe": RECIPES[recipe], "telemetry": {"fp8_every_steps": 5}}
    _, plain = train_here(job(**{**WITHOUT, **own}))
    _, replayed = train_here(job(**{**RUN, **own}))
    found = graphs_of(replayed)
    assert found["reason"] is None
    # Of 40 steps not: three of each of the two shapes, and the first of each that is recorded.
    assert found["replayed_steps"] >= 32
    expected, figures = health_of(plain), health_of(replayed)
    assert figures.keys() == expected.keys()
    assert {step for step, _ in figures} == set(range(5, 41, 5))
    for key, value in expected.items():
        if key[1].endswith(("/saturated", "/underflow")):
            assert figures[key] == pytest.approx(value, abs=0.01), key
        elif key[1].endswith(("/amax", "/scale")):
            assert figures[key] == pytest.approx(value, rel=0.2), key
    changing = {name for _, name in figures if name.endswith("grad_output/amax")}
    for name in changing:
        assert len({figures[step, name] for step in range(10, 41, 5)}) > 3, name


def test_a_capture_that_fails_leaves_the_run_as_it_was(
    job: Job, train_here: TrainHere, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the device in its middle, and random numbers are drawn afterwards."""
    limited_by_host(monkeypatch)

    def plant(assembled: Assembled) -> None:
        learner = assembled.learner
        compute = learner.forward_backward

        def waiting(*arguments: Any, **options: Any) -> Tensor:
            loss = compute(*arguments, **options)
            if torch.cuda.is_current_stream_capturing():
                loss.item()
            else:
                torch.rand(4, device="cuda")
            return loss

        learner.forward_backward = waiting  # type: ignore[method-assign]

    own = {"recipe": RECIPES["delayed"]}
    _, plain = train_here(job(**WITHOUT, **own))
    _, failed = train_here(job(**RUN, **own), plant=plant)
    found = graphs_of(failed)
    assert found["replayed_steps"] == 0
    assert "the capture failed" in found["reason"]
    assert len(events(failed, "step_not_graphed")) == 1
    expected = series(plain, "train/loss")
    assert series(failed, "train/loss") == pytest.approx(expected, rel=2e-3)


def test_steps_that_the_host_was_ahead_of_are_not_counted() -> None:
    late = LateMetrics(late=True)
    loss = torch.zeros((), device="cuda")
    for step in range(1, 4):
        late.push(step, {"loss": loss}, {})
        torch.cuda.synchronize()
    assert late.waited_for_host == 2
    torch.cuda._sleep(200_000_000)
    late.push(4, {"loss": loss}, {})
    late.push(5, {"loss": loss}, {})
    assert late.waited_for_host == 0
