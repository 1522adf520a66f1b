"""Ranks decide together: where they stop, what a bad step leads to, and from where they go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.data.batches import BatchSource
from fp8core.data.prefetch import PrefetchedBatches
from fp8core.engines.emulated import EmulatedEngine
from fp8core.training import run
from fp8core.training.assemble import Assembled
from fp8core.training.ranks.place import RankPlace, is_gone
from fp8core.training.saving import Saver

Job = Callable[..., Path]
Series = Callable[[Path, str], dict[int, float]]
Telemetry = Callable[[Path], list[dict[str, Any]]]
TWO = {"device": "cpu", "cpu_ranks": 2}
BRIEF = {"evaluation": {"every_steps": 0, "max_batches": 1}, "resources": TWO}


class AtStep:
    """Does something once, on rank 1, as the gradients of one step are about to be computed."""

    def __init__(self, step: int, act: Callable[[Assembled], None]) -> None:
        self._step, self._act = step, act

    def __call__(self, rank: int, assembled: Assembled) -> None:
        if rank != 1:
            return
        compute = assembled.learner.gradients
        done: list[bool] = []

        def acting(step: int, *arguments: Any, **options: Any) -> torch.Tensor:
            if step == self._step and not done:
                done.append(True)
                self._act(assembled)
            return compute(step, *arguments, **options)

        assembled.learner.gradients = acting  # type: ignore[method-assign]


def kill(assembled: Assembled) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ask_to_stop(assembled: Assembled) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def wait_in_vain(rank: int, assembled: Assembled) -> None:
    """Rank 1 is asked to stop while it waits for the second micro-batch of step 3, for ever."""
    if rank != 1:
        return
    made, make = [0], BatchSource.__next__

    def held(source: BatchSource) -> Any:
        made[0] += 1
        if made[0] == 6:
            threading.Event().wait()
        return make(source)

    def ahead(*arguments: Any, interrupted: Callable[[], bool], **options: Any) -> Any:
        def asked() -> bool:  # by who has no batch
            if made[0] == 6:
                made[0] += 1
                os.kill(os.getpid(), signal.SIGTERM)
            return interrupted()

        return PrefetchedBatches(*arguments, interrupted=asked, **options)

    BatchSource.__next__ = held  # type: ignore[method-assign]
    run.PrefetchedBatches = ahead  # type: ignore[misc, assignment]


def be_the_last(rank: int, assembled: Assembled) -> None:
    """Rank 1 asks whether all is saved when nothing is left of rank 0."""
    own = RankPlace.of_environment()
    if rank == 0 or own is None:
        return
    first = RankPlace(0, own.count, own.folder)
    finish = Saver.finish

    def late(saver: Saver) -> None:
        deadline = time.monotonic() + 60
        while not is_gone(first.read_pid() or 0):
            assert time.monotonic() < deadline, "rank 0 waits for rank 1"
            time.sleep(0.01)
        finish(saver)

    Saver.finish = late  # type: ignore[method-assign]


def keep_a_layer(rank: int) -> None:
    """Rank 1's engine takes one layer less, as where the proof of a block fails on one GPU."""
    if rank == 0:
        return
    asked, refusal = [0], EmulatedEngine.linear_refusal

    def once(engine: EmulatedEngine, linear: Any) -> str | None:
        asked[0] += 1
        return "for a test" if asked[0] == 3 else refusal(engine, linear)

    EmulatedEngine.linear_refusal = once  # type: ignore[method-assign]


def spoil(assembled: Assembled) -> None:
    """The next forward pass through one layer gives an infinity; so does its repetition."""
    layer = assembled.learner.model.get_submodule("model.layers.1.mlp.down_proj")
    left = [2]

    def infinite(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if left[0] == 0:
            return output
        left[0] -= 1
        return output * float("inf")

    layer.register_forward_hook(infinite)


def test_a_run_goes_on_exactly_after_the_death_of_a_rank(
    job: Job, run_ranks: Any, series: Series, tmp_path: Path
) -> None:
    spec = job(resources=TWO)
    whole = run_ranks(spec).workdir
    parted = tmp_path / "parted"
    ended = run_ranks(spec, parted, plant=AtStep(5, kill))
    assert ended.codes == [1, -signal.SIGKILL]
    assert ended.ends[0].secondary
    assert ended.ends[0].result["reason"] == "trainer_crashed"
    assert "lost the others" in ended.ends[0].result["detail"]
    assert max(series(parted, "train/loss")) == 4
    resumed = run_ranks(spec, parted)
    assert resumed.codes == [0, 0]
    # Dropout is on, and each rank's numbers are its own.
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(parted, name) == series(whole, name)
    state = json.loads((whole / "checkpoints/step-00000003/state.json").read_bytes())
    assert state["random"]["torch"] != state["other_ranks"][0]["torch"]

    # Another number of ranks has other batches and other random numbers.
    alone = tmp_path / "alone"
    shutil.copytree(whole / "checkpoints", alone / "checkpoints")
    from fp8core.commands.train import run_train

    assert run_train(job(), alone, []) == 2
    detail = json.loads((alone / "result.json").read_bytes())["detail"]
    assert detail.startswith("/resources/cpu_ranks: step-00000006 was made by 2 rank(s)")


def test_all_stop_at_the_step_at_which_one_was_asked_to(
    job: Job, run_ranks: Any, telemetry: Telemetry
) -> None:
    spec = job(**BRIEF, training={"steps": 50}, checkpoint={"every_steps": 0})
    ended = run_ranks(spec, plant=AtStep(3, ask_to_stop))
    assert ended.codes == [0, 0]
    results = [end.result for end in ended.ends]
    assert [result["outcome"] for result in results] == ["stopped", "stopped"]
    assert [result["step"] for result in results] == [3, 3]
    saved = [r for r in telemetry(ended.workdir) if r["type"] == "checkpoint"]
    assert [(record["step"], record["kind"]) for record in saved] == [(3, "stop")]


def test_all_stop_where_one_is_asked_to_while_it_waits_for_data(
    job: Job, run_ranks: Any, series: Series
) -> None:
    parts: dict[str, Any] = {
        **BRIEF,
        "training": {"steps": 5, "gradient_accumulation": 2},
        "resources": {**TWO, "rank_timeout_seconds": 60},
    }
    spec = job(**parts, checkpoint={"every_steps": 0})
    whole = run_ranks(spec).workdir
    ended = run_ranks(spec, plant=wait_in_vain)
    assert ended.codes == [0, 0]
    results = [end.result for end in ended.ends]
    assert [(result["outcome"], result["step"]) for result in results] == [("stopped", 2)] * 2
    # Rank 0 had its batches of the third step, which nobody has trained on.
    resumed = run_ranks(spec, ended.workdir)
    assert resumed.codes == [0, 0]
    for name in ("train/loss", "train/grad_norm"):
        assert series(resumed.workdir, name) == series(whole, name)


def test_a_rank_may_end_before_another_has_heard_that_all_is_saved(
    job: Job, run_ranks: Any
) -> None:
    ended = run_ranks(job(**BRIEF, training={"steps": 2}), plant=be_the_last)
    assert ended.codes == [0, 0]
    assert [end.result["outcome"] for end in ended.ends] == ["succeeded", "succeeded"]


@pytest.mark.parametrize(
    "action",
    ["fail", pytest.param("skip_step", marks=pytest.mark.slow), "fallback_bf16"],
)
def test_a_bad_step_of_one_rank_is_one_of_all(
    job: Job, run_ranks: Any, telemetry: Telemetry, action: str
) -> None:
    ended = run_ranks(
        job(**BRIEF, training={"steps": 4, "on_divergence": action}), plant=AtStep(2, spoil)
    )
    told = {r["kind"]: r for r in telemetry(ended.workdir) if r["type"] == "event"}
    event = {"fail": "diverged", "skip_step": "step_skipped"}.get(action, action)
    assert told[event]["data"]["rank"] == 1
    assert told[event]["data"]["layer"] == "model.layers.1.mlp.down_proj"
    assert "micro-batch 1 of rank 1" in told[event]["message"]
    results = [end.result for end in ended.ends]
    if action == "fail":
        assert ended.codes == [7, 7]
        assert [(r["reason"], r["rank"]) for r in results] == [("diverged", 1)] * 2
        return
    # Weights and FP8 state were compared between the ranks when the last step was saved.
    assert ended.codes == [0, 0]
    report = json.loads((ended.workdir / "report.json").read_bytes())["divergence"]
    assert report["skipped_steps"] == (1 if action == "skip_step" else 0)
    layers = ["model.layers.1.mlp.down_proj"] if action == "fallback_bf16" else []
    assert list(report["fallback_bf16"]) == layers


def test_ranks_that_convert_unlike_layers_say_so_before_they_train(
    job: Job, run_ranks: Any
) -> None:
    """They would exchange unlike numbers of amaxes, and wait for each other."""
    ended = run_ranks(job(**BRIEF), prepare=keep_a_layer)
    for end in ended.ends:
        detail = end.result["detail"]
        assert "the ranks have not converted and fused alike: model.layers.0.self_attn" in detail
        assert "became EmulatedLinear on rank 0" in detail
        assert "what it was (for a test) on rank 1" in detail
    assert not list(ended.workdir.glob("checkpoints/*"))


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "fp8"])
def test_a_reference_and_early_stopping_are_those_of_all(
    base: str | None, job: Job, run_ranks: Any, series: Series
) -> None:
    """Also adapters, beside either base, and a tokenizer that rank 0 trains for all."""
    spec = job(
        resources=TWO,
        tokenizer={"source": "train", "vocab_size": 300},
        adapter={"rank": 2, "base_weights": base},
        training={
            "steps": 8,
            "parity": {"steps": 2, "bound": 1.0},
            "early_stopping": {"patience": 1, "min_delta": 10.0},
        },
        evaluation={"every_steps": 2, "max_batches": 2},
    )
    ended = run_ranks(spec)
    assert ended.codes == [0, 0]
    assert [end.result["reason"] for end in ended.ends] == ["early_stopped"] * 2
    assert [end.result["step"] for end in ended.ends] == [4, 4]
    assert list(series(ended.workdir, "parity/reference_loss")) == [1, 2]
    assert (ended.workdir / "model/tokenizer.json").exists()
    assert (ended.workdir / "model/model.safetensors").exists()
