"""How a run ended: the outcome, the reason, and the exit code of the trainer process."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Outcome(StrEnum):
    """What became of one run of a job."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class Reason(StrEnum):
    """Why a run ended as it did: one vocabulary for trainer, worker, API and client."""

    COMPLETED = "completed"
    EARLY_STOPPED = "early_stopped"
    CANCELLED_BY_USER = "cancelled_by_user"
    STOPPED_BY_REQUEST = "stopped_by_request"
    SPEC_INVALID = "spec_invalid"
    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    WORKER_LOST = "worker_lost"
    WALL_TIME_EXCEEDED = "wall_time_exceeded"
    QUEUE_TIME_EXCEEDED = "queue_time_exceeded"
    STALLED = "stalled"
    GPU_IDLE = "gpu_idle"
    PREEMPTED = "preempted"
    NODE_DRAINED = "node_drained"
    UNDELIVERED = "undelivered"
    MODEL_UNAVAILABLE = "model_unavailable"
    DATA_INVALID = "data_invalid"
    ENGINE_UNSUPPORTED = "engine_unsupported"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    STORAGE_FULL = "storage_full"
    TRAINER_CRASHED = "trainer_crashed"
    CUDA_ERROR = "cuda_error"
    COMMUNICATION_ERROR = "communication_error"
    HARDWARE_FAULT = "hardware_fault"
    NO_CAPABLE_NODE = "no_capable_node"
    INTERNAL_ERROR = "internal_error"


class ExitCode(IntEnum):
    """Exit status of `python -m fp8core`. A status outside this list is a crash."""

    OK = 0
    INTERNAL_ERROR = 1
    SPEC_INVALID = 2
    DATA_INVALID = 3
    MODEL_UNAVAILABLE = 4
    ENGINE_UNSUPPORTED = 5
    OUT_OF_MEMORY = 6
    DIVERGED = 7
    CHECKPOINT_CORRUPT = 8
    STORAGE_FULL = 9
    STOPPED = 10
