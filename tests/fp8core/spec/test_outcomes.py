"""The words and numbers that other programs store and compare."""

from __future__ import annotations

from fp8core.spec import ExitCode, Outcome, Reason


def test_outcomes() -> None:
    assert {outcome.value for outcome in Outcome} == {"succeeded", "failed", "stopped"}


def test_reasons() -> None:
    assert {reason.value for reason in Reason} == {
        "completed", "early_stopped", "cancelled_by_user", "stopped_by_request", "spec_invalid",
        "out_of_memory", "diverged", "worker_lost", "wall_time_exceeded", "model_unavailable",
        "data_invalid", "engine_unsupported", "checkpoint_corrupt", "storage_full",
        "trainer_crashed", "no_capable_node", "internal_error", "queue_time_exceeded", "stalled",
        "gpu_idle",
        "preempted", "node_drained", "undelivered", "cuda_error", "communication_error",
        "hardware_fault",
    }  # fmt: skip


def test_exit_codes() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0, "INTERNAL_ERROR": 1, "SPEC_INVALID": 2, "DATA_INVALID": 3,
        "MODEL_UNAVAILABLE": 4, "ENGINE_UNSUPPORTED": 5, "OUT_OF_MEMORY": 6, "DIVERGED": 7,
        "CHECKPOINT_CORRUPT": 8, "STORAGE_FULL": 9, "STOPPED": 10,
    }  # fmt: skip
