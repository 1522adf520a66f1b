"""Checkpoints are written beside training: what is in them, what waits, what faults lead to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8core.errors import StorageFull, TrainingError
from fp8core.models import plan
from fp8core.spec import parse_spec
from fp8core.spec.outcomes import Outcome, Reason
from fp8core.training import host_copy, saving
from fp8core.training.assemble import Assembled
from fp8core.training.checkpoint import CheckpointStore, SavedCheckpoint, verify
from fp8core.training.host_copy import HostCopy, available_host_bytes, bytes_of_copy
from fp8core.training.stopping import StopRequest

Job = Callable[..., Path]
Telemetry = Callable[[Path], list[dict[str, Any]]]

EVERY_3: dict[str, Any] = {
    "training": {"steps": 7},
    "checkpoint": {"every_steps": 3, "keep_last": 5},
    "evaluation": {"fraction": 0.0},
}
# A liveness bound: nothing here takes a tenth of it.
PATIENCE = 60.0


class Watched:
    """Knows which step a run is at and which checkpoints are being written, and may hold one back
    until a step has begun or for ever fail it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._step = 0
        self.writing = 0
        self.most = 0
        self.threads: dict[int, str] = {}
        self.until: dict[int, int] = {}
        self.failing: dict[int, Exception] = {}
        self.at_step: dict[int, Callable[[], None]] = {}
        original = CheckpointStore.save

        def save(store: CheckpointStore, step: int, **what: Any) -> SavedCheckpoint:
            self.threads[step] = threading.current_thread().name
            self.writing += 1
            self.most = max(self.most, self.writing)
            try:
                if step in self.until and not self.reached(self.until[step]):
                    raise AssertionError(f"training did not go on while step {step} was written")
                if step in self.failing:
                    raise self.failing[step]
                return original(store, step, **what)
            finally:
                self.writing -= 1

        monkeypatch.setattr(CheckpointStore, "save", save)

    def reached(self, step: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._step >= step, PATIENCE)

    def plant(self, assembled: Assembled) -> None:
        compute = assembled.learner.gradients

        def counted(step: int, *arguments: Any, **options: Any) -> torch.Tensor:
            with self._changed:
                self._step = step
                self._changed.notify_all()
            if step in self.at_step:
                self.at_step.pop(step)()
            return compute(step, *arguments, **options)

        assembled.learner.gradients = counted  # type: ignore[method-assign]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def saved_in(workdir: Path) -> list[int]:
    """The steps of whole checkpoints; each is verified, and nothing unfinished lies beside them."""
    folders = sorted((workdir / "checkpoints").iterdir())
    steps = [int(folder.name.removeprefix("step-")) for folder in folders]
    for folder, step in zip(folders, steps, strict=True):
        verify(folder, step)
    return steps


def told(records: list[dict[str, Any]]) -> list[int]:
    return [record["step"] for record in records if record["type"] == "checkpoint"]


def test_training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(
    job: Job, train_here: Any, watched: Watched, telemetry: Telemetry, monkeypatch: Any
) -> None:
    watched.until = {3: 5}
    _, beside = train_here(job(**EVERY_3), plant=watched.plant)
    assert watched.threads == {3: "checkpoint", 6: "checkpoint", 7: "MainThread"}
    assert saved_in(beside) == told(telemetry(beside)) == [3, 6, 7]
    files = (beside / "checkpoints/step-00000003").glob("*.safetensors")
    planned = plan(parse_spec(job(**EVERY_3).read_bytes())).checkpoint_bytes
    assert sum(file.stat().st_size for file in files) == pytest.approx(planned, rel=0.1)
    # The same run, which waits while it saves.
    watched.until = {}
    monkeypatch.setattr(saving, "HostCopy", lambda: None)
    _, waiting = train_here(job(**EVERY_3), plant=watched.plant)
    assert set(watched.threads.values()) == {"MainThread"}
    for step in (3, 6, 7):
        mine, its = (verify(each / f"checkpoints/step-{step:08d}") for each in (beside, waiting))
        digests = [
            {e["path"]: e["sha256"] for e in manifest["files"] if e["path"] != "state.json"}
            for manifest in (mine, its)
        ]
        assert digests[0] == digests[1]


def test_one_is_written_at_a_time_in_order_of_steps(
    job: Job, train_here: Any, watched: Watched, telemetry: Telemetry
) -> None:
    watched.until = {1: 2, 2: 3, 3: 4}
    spec = job(
        training={"steps": 5},
        checkpoint={"every_steps": 1, "keep_last": 2},
        evaluation={"fraction": 0.0},
    )
    result, workdir = train_here(spec, plant=watched.plant)
    assert result.outcome == Outcome.SUCCEEDED
    assert watched.most == 1
    records = telemetry(workdir)
    assert told(records) == [1, 2, 3, 4, 5]
    removed = [r["data"]["step"] for r in records if r.get("kind") == "checkpoint_removed"]
    assert (removed, saved_in(workdir)) == ([1, 2, 3], [4, 5])


def test_what_it_failed_with_ends_the_run_soon(
    job: Job, train_here: Any, watched: Watched, telemetry: Telemetry, tmp_path: Path
) -> None:
    watched.until = {3: 4}
    watched.failing = {3: StorageFull("no room left to write it")}
    spec = job(**EVERY_3 | {"training": {"steps": 5000}})
    with pytest.raises(StorageFull, match="no room left"):
        train_here(spec, tmp_path / "work", plant=watched.plant)
    assert saved_in(tmp_path / "work") == told(telemetry(tmp_path / "work")) == []
    assert list(watched.threads) == [3]


def test_a_run_that_fails_waits_for_the_checkpoint_before(
    job: Job, train_here: Any, watched: Watched, telemetry: Telemetry, tmp_path: Path
) -> None:
    def fail() -> None:
        raise RuntimeError("a fault of the step")

    watched.until, watched.at_step = {3: 4}, {4: fail}
    with pytest.raises(RuntimeError, match="a fault of the step"):
        train_here(job(**EVERY_3), tmp_path / "work", plant=watched.plant)
    assert saved_in(tmp_path / "work") == told(telemetry(tmp_path / "work")) == [3]


def test_a_stop_waits_for_the_one_before_and_saves_its_own(
    job: Job, train_here: Any, watched: Watched, telemetry: Telemetry
) -> None:
    stop = StopRequest()
    watched.until, watched.at_step = {3: 4}, {4: stop.request}
    result, workdir = train_here(job(**EVERY_3), plant=watched.plant, stop=stop)
    assert (result.outcome, result.step) == (Outcome.STOPPED, 4)
    assert saved_in(workdir) == told(telemetry(workdir)) == [3, 4]


def test_without_memory_for_a_copy_training_waits_and_says_so(
    job: Job, train_here: Any, watched: Watched, telemetry: Telemetry, monkeypatch: Any
) -> None:
    monkeypatch.setattr(saving, "available_host_bytes", lambda: 1000)
    result, workdir = train_here(job(**EVERY_3), plant=watched.plant)
    assert result.outcome == Outcome.SUCCEEDED
    assert set(watched.threads.values()) == {"MainThread"}
    assert saved_in(workdir) == [3, 6, 7]
    (event,) = [r for r in telemetry(workdir) if r.get("kind") == "saving_waits"]
    assert event["data"]["free"] == 1000 < event["data"]["needed"]


def test_a_file_that_holds_something_else_is_never_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=0)
    weight = torch.full((64, 64), torch.nan)  # which equals nothing, itself included
    tensors = {"model": {"w": weight}, "engine": {}, "optimizer": {"updates": torch.tensor(3)}}
    store.save(1, tensors=tensors, state={}, metric=None)

    def torn(held: Any, path: Path, **more: Any) -> None:
        save_file(held, path, **more)
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x01")

    monkeypatch.setattr("fp8core.training.tensor_files.save_file", torn)
    with pytest.raises(TrainingError, match="does not hold what was written") as caught:
        store.save(2, tensors=tensors, state={}, metric=None)
    assert caught.value.reason == Reason.HARDWARE_FAULT
    assert saved_in(tmp_path) == [1]


def test_a_copy_stays_as_it_was_and_its_memory_is_used_again() -> None:
    copy = HostCopy()
    live = {"model": {"w": torch.arange(6.0).reshape(2, 3).t(), "n": torch.tensor(4)}}
    first = copy.take(live)()
    live["model"]["w"].zero_()
    assert first["model"]["w"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert first["model"]["n"].item() == 4
    again = copy.take(live)()
    assert again["model"]["w"].data_ptr() == first["model"]["w"].data_ptr()
    assert not again["model"]["w"].any()
    with pytest.raises(MemoryError):
        copy.take({"model": {"w": torch.empty(1, dtype=torch.uint8).expand(1 << 62)}})
    assert not copy.held


def test_a_copy_takes_no_more_than_its_tensors() -> None:
    dtypes = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.int64]
    live = {
        "model": {str(dtype): torch.arange(37).to(dtype) for dtype in dtypes},
        "engine": {"none": torch.empty(0, 3), "one": torch.tensor(True)},
        "optimizer": {f"m{number}": torch.full((1025,), float(number)) for number in range(9)},
    }
    copy = HostCopy()
    found = copy.take(live)()
    tensors = [(stem, name) for stem, named in live.items() for name in named]
    for stem, name in tensors:
        kept, tensor = found[stem][name], live[stem][name]
        assert (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape)
        assert kept.double().equal(tensor.double())
        assert kept.is_contiguous()
    places = [t.data_ptr() for named in found.values() for t in named.values() if t.numel()]
    size = sum(t.nbytes for named in live.values() for t in named.values())
    assert max(places) - min(places) + 1025 * 4 <= bytes_of_copy(live) < size + 64 * len(tensors)
    # Other tensors have memory of their own.
    other = copy.take({"model": {"w": torch.ones(1025)}})()
    assert bool((other["model"]["w"] == 1).all())
    assert found["optimizer"]["m8"].tolist() == [8.0] * 1025


def test_what_is_left_is_the_least_of_machine_and_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = available_host_bytes()
    assert whole is not None
    assert whole > 0
    own = [
        line.split(":", 2)[2].strip("/")
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if not line.split(":", 2)[1] or "memory" in line.split(":", 2)[1].split(",")
    ]
    for names, folder in (
        (("memory.max", "memory.current", "inactive_file"), tmp_path),
        (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), None),
    ):
        for path in own:
            place = (folder or tmp_path / "memory") / path
            place.mkdir(parents=True, exist_ok=True)
            (place / names[0]).write_text("1000\n")
            (place / names[1]).write_text("900\n")
            (place / "memory.stat").write_text(f"anon 1\n{names[2]} 300\n")
    monkeypatch.setattr(host_copy, "_CGROUPS", tmp_path)
    assert available_host_bytes() == (400 if own else whole)
