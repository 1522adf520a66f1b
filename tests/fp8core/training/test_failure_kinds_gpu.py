"""Failures of a real GPU, each told by its own reason and with the last lines of the log.

A trainer of its own process (or two of them, behind the launcher) fails in its second step. What
the worker would report of it is judged from what it left: result, crash log, output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.spec.outcomes import Outcome, Reason
from octrain_worker.supervisor.collector import last_lines
from octrain_worker.supervisor.outcome import Ending, Verdict, classify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

Job = Callable[..., Path]
HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
LAST_LINES = 50
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@dataclass(frozen=True)
class Failed:
    """A trainer that has ended: its own account, its output, and what the worker reports."""

    result: dict[str, Any] | None
    status: int
    log: str
    verdict: Verdict


def fail(job: Job, tmp_path: Path, fault: str, **parts: Any) -> Failed:
    """Trains until ``fault`` comes; prints all that is known of the end."""
    spec = job(**{"recipe": {"engine": "amp", "dtype": "fp32"}, **parts})
    work, log = tmp_path / "work", tmp_path / "log"
    command = [sys.executable, "-m", "fp8core", "train", str(spec), "--workdir", str(work)]
    environment = {
        **os.environ,
        "FAULT": fault,
        "PYTHONPATH": ":".join([f"{HERE / 'planted'}", f"{REPOSITORY}", *sys.path]),
    }
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=output, env=environment, timeout=300, check=False
        )
    told = work / "result.json"
    result = json.loads(told.read_bytes()) if told.exists() else None
    crash_log = last_lines([work / "crash.log"], LAST_LINES)
    ending = Ending(
        result=result,
        status=done.returncode,
        log_tail=last_lines([log], LAST_LINES),
        crash_log=crash_log,
    )
    verdict = classify(ending)
    print(f"--- {fault}: exit code {done.returncode}, result {json.dumps(result, indent=1)}")
    print(f"--- crash log\n{crash_log}\n--- log\n{ending.log_tail}")
    print(f"--- reason {verdict.reason}, resumable {verdict.resumable}; detail\n{verdict.detail}")
    return Failed(result, done.returncode, ending.log_tail, verdict)


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("beyond_the_card", Reason.OUT_OF_MEMORY, "CUDA out of memory"),
        ("no_more_memory", Reason.OUT_OF_MEMORY, "CUDA out of memory"),
        ("device_assert", Reason.CUDA_ERROR, "device-side assert triggered"),
        ("illegal_access", Reason.CUDA_ERROR, "illegal memory access"),
        ("host_memory", Reason.OUT_OF_MEMORY, "the host ran out of memory"),
    ],
)
def test_a_failure_is_told_by_its_kind(
    job: Job, tmp_path: Path, fault: str, reason: Reason, words: str
) -> None:
    training = {"batch_size": 64, "sequence_length": 128} if fault == "no_more_memory" else {}
    failed = fail(job, tmp_path, fault, training=training, resources={"device": "cuda"})
    assert failed.result is not None
    # Not that of a process that aborts because it frees what lies on a failed GPU.
    assert failed.status == failed.result["exit_code"] > 0
    # A kernel that fails may be heard of when the step it was part of is over.
    assert failed.result["step"] in (1, 2)
    verdict = failed.verdict
    assert (verdict.outcome, verdict.reason, verdict.resumable) == (Outcome.FAILED, reason, True)
    assert words in verdict.detail
    assert "step 2 is about to fail" in verdict.detail
    assert verdict.detail.endswith(failed.log)


@two_gpus
def test_a_killed_rank_is_named(job: Job, tmp_path: Path) -> None:
    """Not the one that lost it in NCCL."""
    failed = fail(job, tmp_path, "killed_rank", resources={"device": "cuda", "gpus": 2})
    assert failed.result is not None
    assert (failed.result["rank"], failed.result["signal"]) == (1, "SIGKILL")
    assert failed.verdict.reason == Reason.TRAINER_CRASHED
    assert failed.verdict.detail.startswith("rank 1 of 2 was ended by SIGKILL")
    assert "step 2 is about to fail" in failed.verdict.detail


@two_gpus
def test_an_exchange_that_never_ends_is_one_of_communication(job: Job, tmp_path: Path) -> None:
    resources = {"device": "cuda", "gpus": 2, "rank_timeout_seconds": 10}
    failed = fail(job, tmp_path, "absent_rank", resources=resources)
    assert failed.result is not None
    # Rank 0 tells the other of its timeout, and NCCL's watchdog ends both in the same instant.
    assert failed.result["rank"] in (0, 1)
    assert failed.verdict.reason == Reason.COMMUNICATION_ERROR
    assert failed.verdict.resumable
    assert "timeout" in failed.verdict.detail
    assert "step 2 is about to fail" in failed.verdict.detail
