"""Bad input of every kind, as ``validate`` and ``train`` answer it.

Each is refused with the field and the reason in one line, the right exit code, no traceback, and
nothing half-written.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.commands.cli import main
from fp8core.spec import ExitCode
from fp8core.training.checkpoint import verify
from fp8core.training.workdir import Workdir
from tests.fp8core.bad_input_cases import CASES, JSONL, SPEC, Case


def merged(parts: dict[str, Any]) -> dict[str, Any]:
    spec = copy.deepcopy(SPEC)
    for key, value in parts.items():
        if isinstance(value, dict) and "source" not in value and isinstance(spec.get(key), dict):
            engine = value.get("engine")
            spec[key] = {**({} if engine else spec[key]), **value}
        else:
            spec[key] = value
    return spec


@pytest.fixture
def restored_process() -> Iterator[None]:
    """``train`` takes over signals and asks torch for determinism, for its whole process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    deterministic = torch.are_deterministic_algorithms_enabled()
    random = torch.get_rng_state()
    yield
    torch.set_rng_state(random)
    torch.use_deterministic_algorithms(deterministic)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def told(case: Case, output: str) -> None:
    """One line has field and reason; none is more than a line about this."""
    assert "Traceback" not in output
    assert "internal error" not in output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert any(
        line.startswith(f"error: {case.pointer}: ") and case.words in line for line in errors
    ), output


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_field_and_reason(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], restored_process: None
) -> None:
    case = CASES[name]
    folder = tmp_path / "root"
    folder.mkdir()
    for change in case.prepare:
        change(folder)
    spec, workdir = folder / "spec.json", tmp_path / "work"
    spec.write_text(json.dumps(merged(case.parts)))
    roots = ["--root", str(folder)] if case.rooted else []
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}

    code = main(["validate", str(spec), *roots])
    output = capsys.readouterr()
    assert code == (case.code if case.by_validate else ExitCode.OK)
    if case.by_validate:
        told(case, output.out)

    assert main(["train", str(spec), "--workdir", str(workdir), *roots]) == case.code
    output = capsys.readouterr()
    told(case, output.err)
    result = json.loads((workdir / "result.json").read_bytes())
    assert (result["outcome"], result["exit_code"], result["step"]) == ("failed", case.code, 0)
    assert case.words in result["detail"]
    assert not (workdir / "model").exists()
    assert not list(workdir.glob("checkpoints/*"))
    assert not list(workdir.rglob(".partial*"))
    assert not (workdir / "crash.log").exists()
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "not a file"),
        (lambda path: os.mkfifo(path), "not a file"),
        (lambda path: path.symlink_to(path), "symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "not a file"),
        (lambda path: path.write_bytes(b" " * (5 << 20)), "larger than"),
        (lambda path: path.write_bytes(b""), "the spec is empty"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "not UTF-8"),
        (lambda path: path.write_text(json.dumps(SPEC)[:-9]), "not JSON"),
        (lambda path: path.write_text("[" * 100_000), "nested deeper"),
    ],
    ids=["missing", "folder", "pipe", "loop", "device", "huge", "empty", "utf-16", "cut", "deep"],
)
@pytest.mark.parametrize("command", ["validate", "plan", "convert", "train"])
def test_what_is_no_spec_file(
    command: str,
    make: Callable[[Path], object],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    restored_process: None,
) -> None:
    spec = tmp_path / "spec.json"
    make(spec)
    arguments = ["--workdir", str(tmp_path / "work")] if command == "train" else []
    assert main([command, str(spec), *arguments]) == ExitCode.SPEC_INVALID
    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert words in output
    assert "Traceback" not in output


@pytest.mark.parametrize("name", ["result.json", "telemetry.jsonl", "spec.json", ".lock"])
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("/dev/zero"),
    ],
    ids=["folder", "pipe", "device"],
)
def test_a_workdir_with_something_else_under_its_names(
    name: str,
    make: Callable[[Path], object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    restored_process: None,
) -> None:
    workdir = tmp_path / "work"
    workdir.mkdir()
    make(workdir / name)
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC))
    assert main(["train", str(spec), "--workdir", str(workdir)]) == ExitCode.SPEC_INVALID
    captured = capsys.readouterr()
    assert f"error: cannot use {workdir} as workdir: " in captured.err
    assert "Traceback" not in captured.err
    assert [path.name for path in workdir.iterdir() if path.name != ".lock"] in ([name], [])


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fp8core", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=240,
        **options,
    )


def test_the_process_says_the_same(tmp_path: Path) -> None:
    """As a service runs it: exit code, one line, and a result, from a process of its own."""
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n{"text": \n')
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(merged({"data": JSONL})))
    done = run("train", spec, "--workdir", tmp_path / "work")
    assert done.returncode == ExitCode.DATA_INVALID
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        "error: /data: data.jsonl, line 2: not valid JSON: Expecting value at column 10"
    ]
    spec.write_text(json.dumps(merged({"recipe": {"amax_hist_len": 4}})))
    done = run("validate", spec)
    assert done.returncode == ExitCode.SPEC_INVALID
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_nobody_reading_the_output_ends_no_run(tmp_path: Path) -> None:
    spec, workdir = tmp_path / "spec.json", tmp_path / "work"
    spec.write_text(json.dumps(merged({"training": {"steps": 8}})))
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8core", "train", str(spec), "--workdir", str(workdir)],
        stdout=writing,
        stderr=writing,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    os.close(writing)
    os.close(reading)
    assert process.wait(timeout=240) == ExitCode.OK
    assert json.loads((workdir / "result.json").read_bytes())["step"] == 8


def test_a_full_disk_while_checkpointing_and_room_again(
    small_disk: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    restored_process: None,
) -> None:
    spec, workdir = tmp_path / "spec.json", small_disk.folder / "work"
    parts = {"training": {"steps": 40}, "checkpoint": {"every_steps": 1, "keep_last": 2}}
    spec.write_text(json.dumps(merged(parts)))
    with small_disk.filled_once_there_is("work/checkpoints/step-*"):
        assert main(["train", str(spec), "--workdir", str(workdir)]) == ExitCode.STORAGE_FULL
    output = capsys.readouterr().err
    assert "error: no room left to write" in output
    assert "Traceback" not in output
    result = json.loads((workdir / "result.json").read_bytes())
    assert (result["reason"], result["exit_code"]) == ("storage_full", ExitCode.STORAGE_FULL)
    checkpoints = sorted((workdir / "checkpoints").iterdir())
    assert 1 <= len(checkpoints) <= 2
    for checkpoint in checkpoints:
        verify(checkpoint)  # none is half-written
    assert not (workdir / "model").exists()

    # There is room again: what was trained is not lost.
    small_disk.free()
    assert main(["train", str(spec), "--workdir", str(workdir)]) == ExitCode.OK
    records = [json.loads(line) for line in (workdir / "telemetry.jsonl").open()]
    resumed = [record for record in records if record.get("kind") == "resumed"]
    assert [record["data"]["step"] for record in resumed] == [int(checkpoints[-1].name[5:])]
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))


def test_two_trainers_in_one_workdir(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], restored_process: None
) -> None:
    spec, workdir = tmp_path / "spec.json", tmp_path / "work"
    spec.write_text(json.dumps(SPEC))
    with Workdir(workdir):
        before = sorted(path.name for path in workdir.iterdir())
        assert main(["train", str(spec), "--workdir", str(workdir)]) == ExitCode.INTERNAL_ERROR
        assert capsys.readouterr().err == f"error: another trainer is at work in {workdir}\n"
        assert sorted(path.name for path in workdir.iterdir()) == before
