"""What a supervisor makes of the result that the launcher of several ranks wrote."""

from __future__ import annotations

from typing import Any

import pytest

from fp8core.spec.outcomes import Outcome, Reason
from octrain_worker.supervisor.outcome import Ending, classify
from tests.worker import failure_texts as texts


def killed(**more: Any) -> dict[str, Any]:
    return {
        "outcome": "failed",
        "reason": "trainer_crashed",
        "detail": "rank 1 of 2 was ended by SIGKILL",
        "step": 40,
        "exit_code": 137,
        "ranks": 2,
        "rank": 1,
        "signal": "SIGKILL",
    } | more


@pytest.mark.parametrize(
    ("exhausted", "signal", "reason"),
    [
        (False, "SIGKILL", Reason.TRAINER_CRASHED),
        (True, "SIGKILL", Reason.OUT_OF_MEMORY),
        (True, "SIGSEGV", Reason.TRAINER_CRASHED),
    ],
)
def test_a_killed_rank_is_a_crash_or_the_want_of_memory(
    exhausted: bool, signal: str, reason: Reason
) -> None:
    ending = Ending(result=killed(signal=signal), status=137, host_out_of_memory=exhausted)
    verdict = classify(ending)
    assert (verdict.outcome, verdict.reason) == (Outcome.FAILED, reason)
    assert (verdict.resumable, verdict.step, verdict.exit_code) == (True, 40, 137)
    assert verdict.detail.startswith("rank 1 of 2 was ended by SIGKILL")


@pytest.mark.parametrize(
    ("signal", "reason"),
    [("SIGABRT", Reason.COMMUNICATION_ERROR), ("SIGKILL", Reason.TRAINER_CRASHED)],
)
def test_a_rank_that_aborts_itself_has_said_why_in_the_log(signal: str, reason: Reason) -> None:
    """One that was killed has not: what others say there is that they miss it."""
    result = killed(signal=signal, detail=f"rank 0 of 2 was ended by {signal}", rank=0)
    verdict = classify(Ending(result=result, status=134, log_tail=texts.NCCL_TIMEOUT))
    assert (verdict.reason, verdict.resumable) == (reason, True)
    assert f"rank 0 of 2 was ended by {signal}" in verdict.detail
    assert verdict.detail.endswith(texts.NCCL_TIMEOUT)
