"""A stop is heeded where the run waits for data that does not come, and nothing is lost by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fp8core.data import prefetch
from fp8core.data.jsonl import JsonlSource
from fp8core.data.records import Record
from fp8core.spec.outcomes import Outcome
from fp8core.training import loop, parity, run
from fp8core.training.outcome import RunResult
from fp8core.training.stopping import StopRequest

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
Telemetry = Callable[[Path], list[dict[str, Any]]]
# Liveness bounds: nothing here takes a tenth of them.
PATIENCE = 60.0


class Held:
    """Keeps a marked line from being read; the run is asked to stop when it waits for its batch."""

    def __init__(self) -> None:
        self.stop = StopRequest()
        self.reached = threading.Event()
        self.let_go = threading.Event()
        self.in_vain = False
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._free)
        self._watch.start()

    def _free(self) -> None:
        # A run that waited on would hang the test. What comes before the wait may take its time.
        self.reached.wait()
        self.in_vain = not self._over.wait(PATIENCE)
        self.let_go.set()

    def end(self) -> None:
        self._over.set()
        self.reached.set()
        self._watch.join()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.01)
    made = Held()
    read = JsonlSource.records

    def records(source: JsonlSource, numbers: Sequence[int]) -> list[Record]:
        found = read(source, numbers)
        if any("MARK" in record.fields["text"] for record in found):
            made.reached.set()
            assert made.let_go.wait(2 * PATIENCE)
        return found

    monkeypatch.setattr(JsonlSource, "records", records)

    def asking(kind: Any) -> Any:
        def ahead(*arguments: Any, interrupted: Callable[[], bool], **options: Any) -> Any:
            def asked() -> bool:  # by who has no batch
                if made.reached.is_set():
                    made.stop.request()
                return interrupted()

            return kind(*arguments, interrupted=asked, **options)

        return ahead

    monkeypatch.setattr(run, "PrefetchedBatches", asking(prefetch.PrefetchedBatches))
    monkeypatch.setattr(parity, "PrefetchedBatches", asking(prefetch.PrefetchedBatches))
    monkeypatch.setattr(loop, "AheadBatches", asking(prefetch.AheadBatches))
    yield made
    made.end()
    for thread in threading.enumerate():
        if thread.name == "batches":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def rows(path: Path, marked: int | None) -> Path:
    texts = [f"{index:03d}:" + "x" * (40 + index * 37 % 60) for index in range(400)]
    if marked is not None:
        texts[marked] = "MARK" + texts[marked][4:]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def marked_spec(job: Job, data: Path, **parts: Any) -> Path:
    return job(
        data={"source": "jsonl", "path": str(data), "packing": False, "shuffle": False},
        training={"steps": 40, "batch_size": 4, "gradient_accumulation": 3},
        evaluation={"every_steps": 0, "fraction": 0.0},
        checkpoint={"every_steps": 0, "keep_best": 0},
        telemetry={"log_every_steps": 1},
        **parts,
    )


def test_a_run_that_waits_for_a_batch_stops_and_goes_on_as_if_it_had_not(
    job: Job,
    train_here: TrainHere,
    series: Series,
    held: Held,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Behind the first document 64 are read at once, and 65 lines are sixteen batches: five steps,
    # and the first micro-batch of the sixth.
    data = rows(tmp_path / "data.jsonl", marked=66)
    spec = marked_spec(job, data)
    stopped = tmp_path / "stopped"
    result, _ = train_here(spec, stopped, stop=held.stop)
    assert not held.in_vain, "it ended when the batch came"
    assert (result.outcome, result.step) == (Outcome.STOPPED, 5)
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["step-00000005"]
    held.end()
    result, _ = train_here(spec, stopped)
    assert (result.outcome, result.step) == (Outcome.SUCCEEDED, 40)
    _, whole = train_here(spec)
    for name in ("train/loss", "train/grad_norm"):
        assert series(stopped, name) == series(whole, name)


def test_an_evaluation_that_waits_for_a_batch_is_left_for_the_next_run(
    job: Job, train_here: TrainHere, telemetry: Telemetry, held: Held, tmp_path: Path
) -> None:
    from fp8core.data.order import split_documents

    _, held_out = split_documents(400, 0.5, 0)
    data = rows(tmp_path / "data.jsonl", marked=int(held_out[100]))
    spec = job(
        data={"source": "jsonl", "path": str(data), "packing": False, "shuffle_seed": 0},
        training={"steps": 4},
        evaluation={"every_steps": 2, "fraction": 0.5, "max_batches": None},
        checkpoint={"every_steps": 0, "keep_best": 0},
    )
    result, workdir = train_here(spec, stop=held.stop)
    assert not held.in_vain, "it ended when the batch came"
    assert (result.outcome, result.step) == (Outcome.STOPPED, 2)
    held.end()
    result, _ = train_here(spec, workdir)
    assert (result.outcome, result.step) == (Outcome.SUCCEEDED, 4)
    evaluated = [
        record["step"]
        for record in telemetry(workdir)
        if record["type"] == "metrics" and "eval/loss" in record["values"]
    ]
    assert evaluated == [2, 4]


def test_a_reference_that_waits_for_a_batch_ends_at_once(
    job: Job, train_here: TrainHere, held: Held, tmp_path: Path
) -> None:
    data = rows(tmp_path / "data.jsonl", marked=66)
    spec = marked_spec(job, data)
    document = json.loads(spec.read_text())
    document["training"]["parity"] = {"steps": 20}
    spec.write_text(json.dumps(document))
    result, workdir = train_here(spec, stop=held.stop)
    assert not held.in_vain, "it ended when the batch came"
    assert (result.outcome, result.step) == (Outcome.STOPPED, 0)
    assert not (workdir / "parity.json").exists()


_HELD_FOR_EVER = """
import os, runpy, signal, sys, threading
from fp8core.data import prefetch
from fp8core.data.batches import BatchSource

made, make = [0], BatchSource.__next__

def held(source):
    made[0] += 1
    if made[0] == 4:
        threading.Event().wait()
    return make(source)

class Asking(prefetch.PrefetchedBatches):
    def __init__(self, *arguments, interrupted, **options):
        super().__init__(*arguments, interrupted=lambda: ask() or interrupted(), **options)

def ask():
    if made[0] == 4:
        os.kill(os.getpid(), signal.SIGTERM)
        made[0] += 1

BatchSource.__next__ = held
prefetch.PrefetchedBatches = Asking
runpy.run_module("fp8core", run_name="__main__")
"""


def test_a_process_that_waits_for_a_batch_for_ever_saves_and_ends(job: Job, tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    spec = job(evaluation={"every_steps": 0}, checkpoint={"every_steps": 0})
    ended = subprocess.run(
        [sys.executable, "-c", _HELD_FOR_EVER, "train", str(spec), "--workdir", str(workdir)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=2 * PATIENCE,
    )
    result = json.loads((workdir / "result.json").read_bytes())
    assert (result["outcome"], result["step"]) == ("stopped", 3)
    assert ended.returncode == result["exit_code"]
    assert (workdir / "checkpoints/step-00000003").is_dir()
