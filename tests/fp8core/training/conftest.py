"""A small job, and ways to run it: in this process, or in one that may be killed."""

from __future__ import annotations

import copy
import json
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from fp8core.commands.train import run_train
from fp8core.spec import parse_spec
from fp8core.telemetry import TelemetryWriter, decode_number, read_records
from fp8core.training.assemble import Assembled, assemble
from fp8core.training.build import Places
from fp8core.training.outcome import RunResult
from fp8core.training.run import Run
from fp8core.training.stopping import StopRequest
from fp8core.training.workdir import Workdir

# Dropout, so that a random state that is not restored shows.
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
}
EMULATED = {"engine": "emulated", "amax_history_len": 4, "interval": 2}
FP32 = {"engine": "amp", "dtype": "fp32"}


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """Writes a spec; arguments are parts of it, merged into the defaults. Returns its path."""
    count = 0

    def write(**parts: Any) -> Path:
        nonlocal count
        count += 1
        spec: dict[str, Any] = {
            "model": {"source": "config", "config": MODEL},
            "tokenizer": "bytes",
            "data": {"source": "builtin"},
            "recipe": EMULATED,
            "training": {"steps": 6, "batch_size": 2, "sequence_length": 32},
            "evaluation": {"every_steps": 3, "max_batches": 2},
            "checkpoint": {"every_steps": 3},
            "resources": {"device": "cpu"},
        }
        merge(spec, parts)
        path = tmp_path / f"spec-{count}.json"
        path.write_text(json.dumps(spec))
        return path

    return write


def merge(target: dict[str, Any], parts: dict[str, Any]) -> None:
    for key, value in parts.items():
        present = target.get(key)
        alike = (
            isinstance(value, dict)
            and isinstance(present, dict)
            and key != "recipe"
            and value.get("source") in (None, present.get("source"))
        )
        if alike:
            target[key] = copy.deepcopy(target[key])
            merge(target[key], value)
        else:
            target[key] = value


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Path]:
    """Trains a spec to its end in a process of its own; returns the workdir."""
    count = 0

    def run(spec: Path, workdir: Path | None = None, **arguments: Any) -> Path:
        nonlocal count
        count += 1
        workdir = workdir or tmp_path / f"work-{count}"
        process = start_process(spec, workdir, **arguments)
        process.join()
        return workdir

    return run


@pytest.fixture
def train_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[RunResult, Path]]:
    """Trains a spec in this process; ``plant`` gets what was assembled for each learner.

    The first for a reference, where there is one. Returns the result and the workdir; raises what
    ended the run.
    """
    count = 0

    def run(
        spec: Path,
        workdir: Path | None = None,
        *,
        plant: Callable[[Assembled], None] = lambda assembled: None,
        stop: StopRequest | None = None,
    ) -> tuple[RunResult, Path]:
        nonlocal count
        count += 1

        def planted(*arguments: Any, **options: Any) -> Assembled:
            assembled = assemble(*arguments, **options)
            plant(assembled)
            return assembled

        for module in ("run", "parity"):
            monkeypatch.setattr(f"fp8core.training.{module}.assemble", planted)
        parsed = parse_spec(spec.read_bytes())
        with (
            Workdir(workdir or tmp_path / f"here-{count}") as place,
            TelemetryWriter(place.telemetry) as writer,
        ):
            places = Places(base=spec.parent)
            wanted = stop or StopRequest()
            return Run(parsed, place, writer, wanted, places=places).execute(), place.path

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., ForkServerProcess]]:
    """Starts training a spec in a process of its own, which ends with the test."""
    processes: list[ForkServerProcess] = []

    def run(spec: Path, workdir: Path, **arguments: Any) -> ForkServerProcess:
        processes.append(start_process(spec, workdir, **arguments))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.join()


def start_process(spec: Path, workdir: Path, **arguments: Any) -> ForkServerProcess:
    # Forked from a process that has everything imported and has computed nothing.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["fp8core.commands.train", "transformers.models.llama.modeling_llama"]
    )
    process = context.Process(target=run_train, args=(spec, workdir, []), kwargs=arguments)
    process.start()
    return process


@pytest.fixture
def telemetry() -> Callable[[Path], list[dict[str, Any]]]:
    """All records of a workdir."""
    return lambda workdir: [record for record, _ in read_records(workdir / "telemetry.jsonl")]


@pytest.fixture
def series() -> Callable[[Path, str], dict[int, float]]:
    """The values of one metric by step; the newest wins where a step was repeated."""

    def read(workdir: Path, name: str) -> dict[int, float]:
        return {
            record["step"]: decode_number(record["values"][name])
            for record, _ in read_records(workdir / "telemetry.jsonl")
            if record["type"] == "metrics" and name in record["values"]
        }

    return read


@pytest.fixture
def result() -> Callable[[Path], dict[str, Any]]:
    return lambda workdir: json.loads((workdir / "result.json").read_bytes())
