"""Which outcome and reason a supervisor gives the end of a trainer, by itself."""

from __future__ import annotations

import pytest

from fp8core.spec.outcomes import Outcome, Reason
from octrain_worker.supervisor.outcome import Ending, StopCause, classify
from tests.worker import failure_texts as texts

SAID = {"outcome": "succeeded", "reason": "completed", "detail": "", "step": 9, "exit_code": 0}


class TestOutcome:
    def test_success_wins_over_a_late_cancel(self) -> None:
        verdict = classify(Ending(SAID, 0, StopCause.CANCEL))
        assert (verdict.outcome, verdict.step) == (Outcome.SUCCEEDED, 9)

    def test_kill_for_memory(self) -> None:
        verdict = classify(Ending(None, -9, host_out_of_memory=True, log_tail="x"))
        assert (verdict.reason, verdict.resumable) == (Reason.OUT_OF_MEMORY, True)
        assert classify(Ending(None, -9)).reason is Reason.TRAINER_CRASHED

    def test_nobody_saw_the_end(self) -> None:
        assert classify(Ending(None, None)).reason is Reason.WORKER_LOST
        assert classify(Ending(SAID, None)).outcome is Outcome.SUCCEEDED

    def test_failure_while_pausing_is_a_failure_while_cancelling_a_cancel(self) -> None:
        failed = {**SAID, "outcome": "failed", "reason": "diverged", "detail": "loss is NaN"}
        assert classify(Ending(failed, 7, StopCause.PAUSE)).reason is Reason.DIVERGED
        cancelled = classify(Ending(failed, 7, StopCause.CANCEL))
        assert cancelled.reason is Reason.CANCELLED_BY_USER
        assert "loss is NaN" in cancelled.detail

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (texts.ILLEGAL_ADDRESS, Reason.CUDA_ERROR),
            (texts.DEVICE_ASSERT, Reason.CUDA_ERROR),
            (texts.CUBLAS_FAILED, Reason.CUDA_ERROR),
            (texts.ECC, Reason.HARDWARE_FAULT),
            (texts.NVLINK, Reason.HARDWARE_FAULT),
            (texts.DEVICE_BUSY, Reason.HARDWARE_FAULT),
            (texts.LOST, Reason.HARDWARE_FAULT),
            (texts.CUDA_OUT_OF_MEMORY, Reason.OUT_OF_MEMORY),
            (texts.CUBLAS_OUT_OF_MEMORY, Reason.OUT_OF_MEMORY),
            (texts.HOST_OUT_OF_MEMORY, Reason.OUT_OF_MEMORY),
            (texts.NCCL_TIMEOUT, Reason.COMMUNICATION_ERROR),
            (texts.NCCL_ERROR, Reason.COMMUNICATION_ERROR),
            (texts.GLOO, Reason.COMMUNICATION_ERROR),
            ("OSError: [Errno 28] No space left on device: 'x'\n", Reason.STORAGE_FULL),
            # The peer that broke down is the cause, whoever spoke last.
            (texts.ECC + texts.NCCL_ERROR, Reason.HARDWARE_FAULT),
            (texts.CUDA_OUT_OF_MEMORY + texts.NCCL_TIMEOUT, Reason.OUT_OF_MEMORY),
            ("ValueError: CUDA is not mentioned here as an error\n", Reason.TRAINER_CRASHED),
        ],
    )
    def test_words_of_a_crash(self, text: str, reason: Reason) -> None:
        verdict = classify(Ending(None, 77, log_tail=f"step 1\n{text}", crash_log=""))
        passing = reason is not Reason.STORAGE_FULL
        assert (verdict.reason, verdict.resumable) == (reason, passing)
        assert "Its last lines:\nstep 1\n" in verdict.detail
        # The same from the exception that the trainer reports, and its traceback.
        said = {"outcome": "failed", "reason": "internal_error", "detail": "it broke", "step": 3}
        reported = classify(Ending(said, 1, crash_log=text))
        if reason is Reason.TRAINER_CRASHED:
            assert (reported.reason, reported.resumable) == (Reason.INTERNAL_ERROR, False)
        else:
            assert (reported.reason, reported.resumable) == (reason, passing)

    def test_a_rank_killed_for_memory(self) -> None:
        killed = Ending(None, 1, host_out_of_memory=True, log_tail=texts.RANK_KILLED)
        assert classify(killed).reason is Reason.OUT_OF_MEMORY
        unproven = Ending(None, 1, log_tail=texts.RANK_KILLED)
        verdict = classify(unproven)
        assert (verdict.reason, verdict.resumable) == (Reason.TRAINER_CRASHED, True)
        assert verdict.detail.startswith("a rank of the trainer was ended by SIGKILL")

    def test_a_rank_that_only_lost_its_peer(self) -> None:
        """Rank 0 reports; what its peer died of stands in the log of both."""
        said = {"outcome": "failed", "reason": "internal_error", "detail": texts.NCCL_ERROR}
        log = texts.ECC + texts.NCCL_ERROR
        assert classify(Ending(said, 1, log_tail=log)).reason is Reason.HARDWARE_FAULT

    def test_a_precise_reason_is_not_explained_away(self) -> None:
        said = {"outcome": "failed", "reason": "data_invalid", "detail": "line 3 is no JSON"}
        verdict = classify(Ending(said, 3, log_tail=texts.ECC))
        assert (verdict.reason, verdict.detail) == (Reason.DATA_INVALID, "line 3 is no JSON")

    def test_result_that_is_none(self) -> None:
        assert classify(Ending({"outcome": "?"}, 1)).reason is Reason.INTERNAL_ERROR
