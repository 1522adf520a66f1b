"""How attempts end that fail: each failure by its own reason, from real processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker import failure_texts as texts


def memory_cgroup(limit: int) -> Path:
    """A new memory cgroup of so many bytes below this process's own; skips where none may be."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root, limit_name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        elif not controllers:
            root, limit_name = Path("/sys/fs/cgroup"), "memory.max"
        else:
            continue
        folder = root / path.lstrip("/") / f"octrain-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit_name).write_text(str(limit))
            return folder
        except OSError:
            folder.rmdir()
    pytest.skip("no memory cgroup may be made here")


def test_failures_are_told_apart(workplace: Any) -> None:
    cases: list[tuple[dict[str, Any], str, bool, str]] = [
        ({"fail_with": ["data_invalid", 3]}, "data_invalid", False, "as the script says"),
        ({"exit_at": 2, "exit_code": 4}, "model_unavailable", False, "exit code 4"),
        ({"exit_at": 2, "exit_code": 0}, "internal_error", False, "left no result"),
        ({"exit_at": 2, "exit_code": 77}, "trainer_crashed", True, "last words"),
        ({"kill_at": 2}, "trainer_crashed", True, "SIGKILL"),
        ({"kill_at": 2, "kill_with": 11}, "trainer_crashed", True, "SIGSEGV"),
        ({"raise_at": 2, "raise": "no such thing"}, "internal_error", False, "Traceback"),
        ({"raise_at": 2, "raise": texts.ILLEGAL_ADDRESS}, "cuda_error", True, "illegal"),
        ({"raise_at": 2, "raise": texts.ECC}, "hardware_fault", True, "GPU failed"),
        (
            {"kill_at": 2, "kill_with": 6, "print_errors": texts.NCCL_TIMEOUT.splitlines()},
            "communication_error",
            True,
            "Watchdog",
        ),
    ]
    attempts = [
        workplace.api.add(f"att_{index}", {"print_errors": ["last words"], **script})
        for index, (script, *_) in enumerate(cases)
    ]
    children = [workplace.supervise(attempt.id) for attempt in attempts]
    for attempt, child, (_, reason, resumable, detail) in zip(
        attempts, children, cases, strict=True
    ):
        assert child.wait(timeout=60) == 0, workplace.log()
        assert attempt.finished["outcome"] == "failed"
        assert attempt.finished["reason"] == reason
        assert attempt.finished["resumable"] is resumable
        assert detail in attempt.finished["detail"]


def test_the_last_fifty_lines_of_the_log_are_told(workplace: Any) -> None:
    """All of them, however long they are: the last ones say why."""
    lines = [f"line {number} of the log: " + "long " * 90 for number in range(70)]
    attempt = workplace.api.add("att_a", {"print_errors": lines, "exit_at": 2, "exit_code": 77})
    assert workplace.supervise("att_a").wait(timeout=60) == 0, workplace.log()
    why, *told = attempt.finished["detail"].split("\n")
    assert "77" in why
    assert told == [line[:500] for line in lines[-50:]]


def test_host_out_of_memory(workplace: Any, tmp_path: Path) -> None:
    """The kernel kills the trainer, which has a cgroup's memory for itself."""
    cgroup = memory_cgroup(256 << 20)
    try:
        attempt = workplace.api.add("att_a", {"eat_memory_at": 2})
        child = workplace.supervise("att_a", within=cgroup)
        assert child.wait(timeout=60) == 0, workplace.log()
    finally:
        cgroup.rmdir()
    assert attempt.finished["reason"] == "out_of_memory"
    assert attempt.finished["resumable"] is True
    assert "the kernel killed the trainer" in attempt.finished["detail"]


def test_trainer_that_cannot_start(workplace: Any) -> None:
    workplace.environment["OCTRAIN_TRAINER_COMMAND"] = f"{sys.executable} -c import.nothing"
    attempt = workplace.api.add("att_a", {})
    assert workplace.supervise("att_a").wait(timeout=30) == 0
    assert attempt.finished["reason"] == "internal_error"
    assert "SyntaxError" in attempt.finished["detail"]


def test_results_that_cannot_be_stored_fail_the_run(workplace: Any, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the store should be")
    workplace.environment["OCTRAIN_SUPERVISOR_UPLOAD_PATIENCE_SECONDS"] = "0.5"
    attempt = workplace.api.add("att_a", {"steps": 2})
    assert workplace.supervise("att_a").wait(timeout=30) == 0, workplace.log()
    assert attempt.finished["outcome"] == "failed"
    assert attempt.finished["reason"] == "storage_full"
    assert "artifact_delayed" in attempt.events
