"""A run that is killed goes on exactly: bit for bit what an uninterrupted one computes."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fp8core.errors import CheckpointCorrupt
from fp8core.training.checkpoint import verify

STEPS = 24
RUN: dict[str, Any] = {
    "training": {
        "steps": STEPS,
        "gradient_accumulation": 2,
        "schedule": {"name": "cosine", "warmup_steps": 5},
    },
    "evaluation": {"every_steps": 4, "max_batches": 2},
    "checkpoint": {"every_steps": 5, "keep_last": 2},
}
RECIPES = {
    "emulated": {"engine": "emulated", "amax_history_len": 4, "interval": 2},
    "amp fp32": {"engine": "amp", "dtype": "fp32"},
    "amp bf16": {"engine": "amp", "dtype": "bf16"},
}
COMPARED = ("train/loss", "train/grad_norm", "train/lr", "eval/loss", "eval/bits_per_byte")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wait_for_step(process: Any, workdir: Path, step: int, series: Any) -> None:
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline:
        if (workdir / "telemetry.jsonl").exists() and max(
            series(workdir, "train/loss"), default=0
        ) >= step:
            return
        time.sleep(0.002)
    assert process.is_alive(), "it ended before it could be killed"
    raise AssertionError(f"step {step} was not reached in two minutes")


@pytest.mark.parametrize("recipe", RECIPES)
def test_after_sigkill_the_run_equals_an_uninterrupted_one(
    job: Callable[..., Path],
    train: Callable[..., Path],
    start: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    telemetry: Callable[[Path], list[dict[str, Any]]],
    result: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
    recipe: str,
) -> None:
    options: dict[str, Any] = dict(RUN)
    if recipe == "amp bf16":
        # Stochastic rounding draws random numbers too.
        options["training"] = {**RUN["training"], "precision": "throughput"}
    spec = job(recipe=RECIPES[recipe], **options)
    whole = train(spec)
    assert result(whole)["outcome"] == "succeeded"

    seed = random.randrange(2**32)
    print(f"random moments of seed {seed}")
    moments = random.Random(seed)
    killed = tmp_path / "killed"
    for earliest in (1, 7, 15):
        process = start(spec, killed)
        wait_for_step(process, killed, earliest + moments.randrange(4), series)
        time.sleep(moments.random() * 0.05)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (killed / "result.json").exists()
    train(spec, killed)
    assert result(killed) == result(whole)

    for name in COMPARED:
        wanted = series(whole, name)
        assert series(killed, name) == wanted
        assert wanted.keys() >= ({STEPS} if name.startswith("eval") else set(range(1, STEPS + 1)))
    last = f"checkpoints/step-{STEPS:08d}"
    for file in ("model", "optimizer", "engine"):
        path = f"{last}/{file}.safetensors"
        assert digest(killed / path) == digest(whole / path)
    assert digest(killed / "model/model.safetensors") == digest(whole / "model/model.safetensors")
    states = [json.loads((run / last / "state.json").read_bytes()) for run in (whole, killed)]
    for state in states:
        state["position"].pop("seconds")
    assert states[0] == states[1]
    records = telemetry(killed)
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    resumed = [record for record in records if record.get("kind") == "resumed"]
    assert resumed[-1]["data"]["step"] >= 10


def test_a_torn_checkpoint_is_skipped_with_an_event_and_the_result_is_the_same(
    job: Callable[..., Path],
    train: Callable[..., Path],
    telemetry: Callable[[Path], list[dict[str, Any]]],
    series: Callable[[Path, str], dict[int, float]],
    result: Callable[[Path], dict[str, Any]],
) -> None:
    spec = job(training={"steps": 9}, checkpoint={"every_steps": 3})
    workdir = train(spec)
    wanted = series(workdir, "train/loss")
    model = digest(workdir / "model/model.safetensors")
    newest = workdir / "checkpoints/step-00000009/model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    train(spec, workdir)
    assert result(workdir)["outcome"] == "succeeded"
    events = [record for record in telemetry(workdir) if record["type"] == "event"]
    skipped = [event for event in events if event["kind"] == "checkpoint_skipped"]
    assert [event["data"]["step"] for event in skipped] == [9]
    assert [e["data"]["step"] for e in events if e["kind"] == "resumed"] == [6]
    assert series(workdir, "train/loss") == wanted
    assert digest(workdir / "model/model.safetensors") == model

    for path in (workdir / "checkpoints").glob("*/model.safetensors"):
        path.write_bytes(b"")
    train(spec, workdir)
    assert result(workdir)["reason"] == "checkpoint_corrupt"
    assert result(workdir)["exit_code"] == 8


def test_sigterm_saves_and_the_next_run_goes_on(
    job: Callable[..., Path],
    train: Callable[..., Path],
    start: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    telemetry: Callable[[Path], list[dict[str, Any]]],
    result: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
) -> None:
    spec = job(**{**RUN, "checkpoint": {"every_steps": 0}})
    whole = train(spec)
    workdir = tmp_path / "stopped"
    process = start(spec, workdir)
    wait_for_step(process, workdir, 5, series)
    process.terminate()
    process.join()
    ended = result(workdir)
    assert (ended["outcome"], ended["reason"]) == ("stopped", "stopped_by_request")
    assert ended["exit_code"] == 10
    assert 5 <= ended["step"] < STEPS
    saved = [record for record in telemetry(workdir) if record["type"] == "checkpoint"]
    assert (saved[-1]["kind"], saved[-1]["step"]) == ("stop", ended["step"])
    assert max(series(workdir, "train/loss")) == ended["step"]
    train(spec, workdir)
    assert result(workdir) == result(whole)
    for name in COMPARED:
        assert series(workdir, name) == series(whole, name)


def test_two_trainers_cannot_share_a_workdir(
    job: Callable[..., Path],
    start: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
) -> None:
    from fp8core.errors import TrainingError
    from fp8core.training.workdir import Workdir

    workdir = tmp_path / "work"
    process = start(job(training={"steps": 100_000}, checkpoint={"every_steps": 0}), workdir)
    wait_for_step(process, workdir, 1, series)
    with pytest.raises(TrainingError, match="another trainer"), Workdir(workdir):
        pass
    process.kill()
    process.join()
    with Workdir(workdir):
        pass


def test_another_spec_in_the_same_workdir_is_refused_with_its_pointer(
    job: Callable[..., Path], train: Callable[..., Path], result: Callable[[Path], dict[str, Any]]
) -> None:
    workdir = train(job(training={"steps": 2}))
    model = digest(workdir / "model/model.safetensors")
    train(job(training={"steps": 2, "optimizer": {"lr": 0.5}}), workdir)
    ended = result(workdir)
    assert ended["reason"] == "spec_invalid"
    assert ended["detail"].startswith("/training/optimizer/lr: ")
    assert digest(workdir / "model/model.safetensors") == model
    train(job(training={"steps": 2}, name="renamed", priority=3), workdir)
    assert result(workdir)["outcome"] == "succeeded"


def test_killed_while_folders_change_places_nothing_is_half_or_lost(
    job: Callable[..., Path],
    train: Callable[..., Path],
    start: Callable[..., Any],
    result: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Saving, pruning and exporting all go through folders of a temporary name: kill there."""
    spec = job(
        tokenizer={"source": "train", "vocab_size": 272},
        training={"steps": 8},
        checkpoint={"every_steps": 1, "keep_last": 1},
        evaluation={"every_steps": 2, "max_batches": 1},
    )
    whole, killed = train(spec), tmp_path / "killed"
    for place in ("checkpoints", "checkpoints", "checkpoints", "."):
        process = start(spec, killed)
        while process.is_alive() and not list((killed / place).glob(".partial-*")):
            pass  # the folder is there for a millisecond
        process.kill()
        process.join()
        for checkpoint in (killed / "checkpoints").glob("step-*"):
            verify(checkpoint)
        if (killed / "model").exists():
            assert (killed / "model/model.safetensors").is_file()
    train(spec, killed)
    assert result(killed) == result(whole)
    assert not list(killed.rglob(".partial-*"))
    kept = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == kept
    for file in (whole / "model").iterdir():
        assert digest(killed / "model" / file.name) == digest(file), file.name


def test_what_a_run_without_checkpoint_left_is_not_taken_for_this_runs_own(
    job: Callable[..., Path], train: Callable[..., Path], result: Callable[[Path], dict[str, Any]]
) -> None:
    workdir = train(job(conversion={"skip": ["no.such.layer"]}))
    assert result(workdir)["reason"] == "spec_invalid"
    config = json.loads((workdir / "tokenizer/config.json").read_bytes())
    assert config["hidden_size"] == 32
    larger = {"source": "config", "config": {**config, "hidden_size": 64, "head_dim": 32}}
    train(job(model=larger, training={"steps": 1}), workdir)
    assert result(workdir)["outcome"] == "succeeded"
    saved = json.loads((workdir / "checkpoints/step-00000001/config.json").read_bytes())
    assert saved["hidden_size"] == 64


@pytest.mark.parametrize(
    "damage",
    [
        {"data": 5},
        {"position": {"step": "x"}},
        {"position": {"step": 1}},
        {"random": {}},
        {"random": {"torch": "AAAA"}},
        {"random": {"numpy": ["MT19937", [1], 0, 0, 0.0]}},
    ],
    ids=str,
)
def test_a_state_that_verifies_and_is_of_no_run_is_called_corrupt(
    job: Callable[..., Path],
    finished: Path,
    result: Callable[[Path], dict[str, Any]],
    train: Callable[..., Path],
    tmp_path: Path,
    damage: dict[str, Any],
) -> None:
    workdir = tmp_path / "damaged"
    shutil.copytree(finished, workdir)
    folder = workdir / "checkpoints/step-00000002"
    state = json.loads((folder / "state.json").read_bytes())
    for part, value in damage.items():
        merge = isinstance(value, dict) and value
        state[part] = {**state[part], **value} if merge else value
    content = json.dumps(state).encode()
    (folder / "state.json").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for entry in manifest["files"]:
        if entry["path"] == "state.json":
            entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    train(job(training={"steps": 2}), workdir)
    assert (result(workdir)["reason"], result(workdir)["exit_code"]) == ("checkpoint_corrupt", 8)
    assert not (workdir / "crash.log").exists()


@pytest.fixture(scope="module")
def finished_runs() -> dict[str, Path]:
    return {}


@pytest.fixture
def finished(
    finished_runs: dict[str, Path],
    job: Callable[..., Path],
    train: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The workdir of one short run, made once. Not to be changed."""
    if "one" not in finished_runs:
        workdir = tmp_path_factory.mktemp("finished") / "work"
        finished_runs["one"] = train(job(training={"steps": 2}), workdir)
    return finished_runs["one"]


def test_a_state_of_layers_that_are_others_now_says_how_to_train_on(
    job: Callable[..., Path], train_here: Callable[..., Any], tmp_path: Path
) -> None:
    """As of a checkpoint from before a version that fuses what was single layers."""
    few = {"checkpoint": {"every_steps": 2}, "evaluation": {"every_steps": 0}}
    training = {"steps": 2}
    spec, workdir = job(recipe=RECIPES["emulated"], training=training, **few), tmp_path / "w"
    train_here(spec, workdir)
    folder = workdir / "checkpoints/step-00000002"
    state = load_file(folder / "engine.safetensors")
    save_file({f"single.{name}": tensor for name, tensor in state.items()}, folder / "engine")
    (folder / "engine").replace(folder / "engine.safetensors")
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for entry in manifest["files"]:
        path = folder / entry["path"]
        entry |= {"size": path.stat().st_size, "sha256": digest(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointCorrupt, match="begin another job with it as the model") as caught:
        train_here(spec, workdir)
    assert "a version that fused other blocks" in str(caught.value)
    # And so it does.
    model = {"source": "path", "path": str(folder)}
    train_here(job(recipe=RECIPES["emulated"], model=model, training=training, **few))
