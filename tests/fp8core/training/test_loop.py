"""The loop: what it computes, when it evaluates, saves and ends, and what it says about it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Job = Callable[..., Path]
Train = Callable[..., Path]
Series = Callable[[Path, str], dict[int, float]]
Records = Callable[[Path], list[dict[str, Any]]]
Result = Callable[[Path], dict[str, Any]]
FP32 = {"engine": "amp", "dtype": "fp32"}


def saved_steps(workdir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (workdir / "checkpoints").iterdir())


def test_a_run_leaves_model_report_and_result(
    job: Job, train: Train, series: Series, telemetry: Records, result: Result
) -> None:
    workdir = train(job())
    assert result(workdir) == {
        "outcome": "succeeded",
        "reason": "completed",
        "detail": "trained 6 steps",
        "step": 6,
        "exit_code": 0,
    }
    assert not list(workdir.glob("**/.partial*"))
    model = AutoModelForCausalLM.from_pretrained(workdir / "model")
    tokenizer = AutoTokenizer.from_pretrained(workdir / "model")
    ids = tokenizer("hello", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 5, 272)

    report = json.loads((workdir / "report.json").read_bytes())
    losses = series(workdir, "train/loss")
    assert report["losses"]["train_first"] == losses[1]
    assert report["losses"]["train_last"] == losses[6]
    assert report["losses"]["train_mean_of_last_10"] == pytest.approx(sum(losses.values()) / 6)
    assert report["losses"]["eval_last"] == series(workdir, "eval/loss")[6]
    assert report["tokens"] == 6 * 2 * 32
    assert report["conversion"]["converted"] == 19
    rows = json.loads((workdir / "conversion.json").read_bytes())
    assert len(rows) == report["conversion"]["layers"]
    assert all(set(row) == {"name", "from", "to", "group", "reason"} for row in rows)

    records = telemetry(workdir)
    phases = [r["phase"] for r in records if r["type"] == "phase"]
    assert phases[:3] == ["loading", "converting", "training"]
    assert phases[-1] == "saving"
    for name in ("train/grad_norm", "train/lr", "perf/tokens_per_second", "perf/step_seconds"):
        values = series(workdir, name)
        assert list(values) == [1, 2, 3, 4, 5, 6]
        assert all(value > 0 for value in values.values())
    assert series(workdir, "memory/peak_bytes")[6] > 50 * 2**20
    progress = [r for r in records if r["type"] == "progress"]
    assert [(r["step"], r["total_steps"]) for r in progress] == [(n, 6) for n in range(1, 7)]
    assert progress[-1]["eta_seconds"] == 0
    artifacts = {r["kind"]: r["path"] for r in records if r["type"] == "artifact"}
    assert artifacts == {
        "conversion": "conversion.json",
        "checkpoint": "checkpoints/step-00000006",
        "report": "report.json",
        "model": "model",
    }


def test_fp8_health_comes_at_its_own_pace_and_can_be_off(
    job: Job, train: Train, telemetry: Records
) -> None:
    def health_steps(workdir: Path) -> set[int]:
        return {
            record["step"]
            for record in telemetry(workdir)
            if record["type"] == "metrics" and any(k.startswith("fp8/") for k in record["values"])
        }

    workdir = train(job(telemetry={"fp8_every_steps": 2}))
    assert health_steps(workdir) == {2, 4, 6}
    names = {
        name
        for record in telemetry(workdir)
        if record["type"] == "metrics"
        for name in record["values"]
        if name.startswith("fp8/")
    }
    assert "fp8/model.layers.0.self_attn.q_proj/input/amax" in names
    assert {name.rpartition("/")[2] for name in names} == {
        "amax",
        "scale",
        "saturated",
        "underflow",
    }
    assert health_steps(train(job(telemetry={"fp8_every_steps": 0}))) == set()


def test_the_seed_decides_everything(job: Job, train: Train, series: Series) -> None:
    first, second = train(job()), train(job())
    other = train(job(training={"seed": 1}))
    assert series(first, "train/loss") == series(second, "train/loss")
    assert (first / "model/model.safetensors").read_bytes() == (
        second / "model/model.safetensors"
    ).read_bytes()
    assert series(other, "train/loss")[1] != series(first, "train/loss")[1]


def test_accumulation_equals_one_large_batch(job: Job, train: Train, series: Series) -> None:
    # Rows of unequal numbers of targets: averaging the micro-batches' means would differ.
    lines = [
        {"prompt": "p" * (3 + 5 * (i % 4)), "completion": "c" * (2 + 17 * (i % 3))}
        for i in range(40)
    ]
    spec = job(recipe=FP32)
    data = spec.with_name("data.jsonl")
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common: dict[str, Any] = {
        "recipe": FP32,
        "model": {"config": {"attention_dropout": 0.0}},
        "data": {
            "source": "jsonl",
            "path": str(data),
            "format": "prompt_completion",
            "packing": False,
        },
    }
    training = {"steps": 5, "sequence_length": 64}
    large = train(job(**common, training={**training, "batch_size": 8}))
    split = train(job(**common, training={**training, "batch_size": 2, "gradient_accumulation": 4}))
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        wanted = series(large, name)
        for step, value in series(split, name).items():
            assert value == pytest.approx(wanted[step], rel=2e-5)


@pytest.mark.parametrize("recipe", [FP32, {"engine": "emulated", "amax_history_len": 4}])
def test_gradient_checkpointing_changes_no_loss(
    job: Job, train: Train, series: Series, recipe: dict[str, Any]
) -> None:
    plain = train(job(recipe=recipe))
    recomputed = train(job(recipe=recipe, training={"gradient_checkpointing": True}))
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(recomputed, name) == series(plain, name)


@pytest.mark.parametrize(("blocks", "wanted"), [(None, [2, 2]), (1, [2, 1]), (2, [2, 2])])
def test_gradient_checkpointing_really_recomputes(blocks: int | None, wanted: list[int]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from fp8core.engines import create
    from fp8core.spec.recipe import AmpRecipe
    from fp8core.training.activation_checkpointing import enable_gradient_checkpointing

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).train()
    calls = [0, 0]

    def count(place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[place] += 1

        return hook

    for place, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(count(place))
    enable_gradient_checkpointing(model, create(AmpRecipe(engine="amp"), "cpu"), blocks)
    model(torch.ones(1, 16, dtype=torch.long)).logits.sum().backward()
    assert calls == wanted


def test_more_blocks_than_a_model_has_are_refused(job: Job, train: Train, result: Result) -> None:
    training = {"gradient_checkpointing": True, "recomputed_blocks": 3}
    ended = result(train(job(recipe=FP32, training=training)))
    assert ended["reason"] == "spec_invalid"
    assert "has 2 blocks" in ended["detail"]


def test_clipping_bounds_the_update_and_the_norm_is_that_before(
    job: Job, train: Train, series: Series
) -> None:
    free = train(job(recipe=FP32, training={"max_grad_norm": None, "steps": 1}))
    tight = train(job(recipe=FP32, training={"max_grad_norm": 1e-9, "steps": 1}))
    assert series(free, "train/grad_norm") == series(tight, "train/grad_norm")

    def moment(workdir: Path) -> float:
        from safetensors.torch import load_file

        held = load_file(workdir / "checkpoints/step-00000001/optimizer.safetensors")
        squares = sum(float(t.square().sum()) for k, t in held.items() if k.endswith("/exp_avg"))
        return math.sqrt(squares) / (1 - 0.9)

    norm = series(free, "train/grad_norm")[1]
    assert moment(free) == pytest.approx(norm, rel=1e-5)
    assert moment(tight) == pytest.approx(1e-9, rel=1e-3)


def test_checkpoints_are_kept_by_count(
    job: Job, train: Train, series: Series, telemetry: Records
) -> None:
    # The learning rate grows until the model gets worse: the best is not among the last.
    workdir = train(
        job(
            recipe=FP32,
            training={
                "steps": 12,
                "max_grad_norm": None,
                "optimizer": {"lr": 0.3},
                "schedule": {"name": "constant", "warmup_steps": 12},
            },
            evaluation={"every_steps": 1},
            checkpoint={"every_steps": 2, "keep_last": 2, "keep_best": 1},
        )
    )
    losses = series(workdir, "eval/loss")
    best = min(losses, key=lambda step: losses[step])
    assert 1 < best < 9
    newest = [step for step in saved_steps(workdir) if step > best][-2:]
    assert saved_steps(workdir) == [best, *newest]
    assert newest[-1] == 12
    found = [r for r in telemetry(workdir) if r["type"] == "checkpoint" and r["best"]]
    assert found[-1]["step"] == best
    assert found[-1]["metric"] == losses[best]


def test_early_stopping_waits_as_told(
    job: Job, train: Train, series: Series, result: Result
) -> None:
    workdir = train(
        job(
            recipe=FP32,
            training={
                "steps": 50,
                "early_stopping": {"patience": 3, "min_delta": 100.0},
            },
            evaluation={"every_steps": 2},
        )
    )
    # The first evaluation is the reference; the three after it cannot improve by 100.
    assert (result(workdir)["reason"], result(workdir)["step"]) == ("early_stopped", 8)
    assert result(workdir)["outcome"] == "succeeded"
    assert list(series(workdir, "eval/loss")) == [2, 4, 6, 8]
    assert (workdir / "model" / "model.safetensors").exists()


def test_epochs_end_a_run_before_its_steps(
    job: Job, train: Train, result: Result, series: Series
) -> None:
    spec = job()
    data = spec.with_name("data.jsonl")
    data.write_text("".join(json.dumps({"text": "x" * 40}) + "\n" for _ in range(10)))
    source = {"source": "jsonl", "path": "data.jsonl", "epochs": 1, "packing": False}
    training = {"steps": 100, "batch_size": 2, "gradient_accumulation": 2, "sequence_length": 48}
    workdir = train(job(data=source, training=training, evaluation={"fraction": 0.0}))
    assert result(workdir)["reason"] == "completed"
    # 10 documents: two full steps of four, then one of the two that are left.
    assert list(series(workdir, "train/loss")) == [1, 2, 3]
    assert series(workdir, "eval/loss") == {}


def test_a_loss_that_is_not_finite_fails_naming_its_step(
    job: Job, train: Train, result: Result, telemetry: Records
) -> None:
    workdir = train(
        job(
            recipe=FP32,
            training={
                "steps": 30,
                "max_grad_norm": None,
                "optimizer": {"lr": 1000.0, "weight_decay": 1000.0},
                "schedule": {"name": "constant"},
            },
            evaluation={"every_steps": 0},
        )
    )
    ended = result(workdir)
    assert (ended["outcome"], ended["reason"], ended["exit_code"]) == ("failed", "diverged", 7)
    bad = ended["step"] + 1
    assert f"step {bad}" in ended["detail"]
    assert max(r["step"] for r in telemetry(workdir) if r["type"] == "metrics") <= bad
    assert not (workdir / "model").exists()
    assert all(step < bad for step in saved_steps(workdir))


def test_fp16_reports_its_scale_and_survives_skipped_steps(
    job: Job, train: Train, series: Series, result: Result
) -> None:
    workdir = train(
        job(
            recipe={
                "engine": "amp",
                "dtype": "fp16",
                "initial_loss_scale": 2.0**32,
                "growth_interval": 4,
            },
            training={"steps": 30},
        )
    )
    assert result(workdir)["outcome"] == "succeeded"
    scales, skipped = series(workdir, "amp/loss_scale"), series(workdir, "amp/skipped_steps")
    assert skipped[30] > 0
    assert scales[30] < 2.0**32
    assert all(math.isfinite(value) for value in series(workdir, "train/loss").values())
    losses = series(workdir, "eval/loss")
    assert losses[30] < losses[3]


def test_a_disk_that_fills_up_fails_with_the_earlier_checkpoint_intact(
    job: Job, train: Train, result: Result, small_disk: Any
) -> None:
    from fp8core.training.checkpoint import verify

    workdir = small_disk.folder / "work"
    spec = job(recipe=FP32, checkpoint={"every_steps": 1, "keep_last": 2}, training={"steps": 500})
    with small_disk.filled_once_there_is("work/checkpoints/step-*"):
        train(spec, workdir)
    ended = result(workdir)
    assert (ended["reason"], ended["exit_code"]) == ("storage_full", 9)
    assert "no room left" in ended["detail"]
    assert 1 <= len(saved_steps(workdir)) <= 2
    for step in saved_steps(workdir):
        verify(workdir / f"checkpoints/step-{step:08d}", step)
    assert not list((workdir / "checkpoints").glob(".partial*"))


def test_ranks_that_the_launcher_did_not_start_are_refused(
    job: Job, train: Train, result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8core.errors import SpecRefused
    from fp8core.spec import parse_spec
    from fp8core.training.device import check_ranks
    from fp8core.training.ranks.place import RankPlace

    one = parse_spec(job().read_bytes())
    two = parse_spec(job(resources={"device": "cpu", "cpu_ranks": 2}).read_bytes())
    check_ranks(one, None)
    check_ranks(two, RankPlace(1, 2, Path()))
    with pytest.raises(SpecRefused, match=r"asks for 2 rank\(s\), and 3 started"):
        check_ranks(two, RankPlace(1, 3, Path()))
    workdir = train(job(resources={"device": "auto", "gpus": 2}))
    assert result(workdir)["detail"].startswith("/resources/gpus: ")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecRefused, match="WORLD_SIZE=2"):
        check_ranks(one, None)
