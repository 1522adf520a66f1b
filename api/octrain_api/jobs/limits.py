"""What a job's spec allows, and what becomes of a failure: to be tried again, or for good.

Specs that were stored before a limit existed do not name it; the limit's default then holds.
"""

from typing import Any

from fp8core.spec.outcomes import Reason
from octrain_api.models import Job

LONGEST_BACKOFF = 3600

# These come back however often the job is started again, whatever its supervisor thinks.
DETERMINISTIC = frozenset(
    {
        Reason.SPEC_INVALID,
        Reason.DATA_INVALID,
        Reason.MODEL_UNAVAILABLE,
        Reason.ENGINE_UNSUPPORTED,
        Reason.DIVERGED,
    }
)


def _limit(job: Job, name: str, default: Any) -> Any:
    return job.spec["limits"].get(name, default)


def max_restarts(job: Job) -> int:
    """How often the job may be started again after a loss or a passing failure."""
    return int(_limit(job, "max_restarts", 3))


def cancel_deadline(job: Job) -> int:
    """Seconds that a cancel or a pause may take."""
    return int(_limit(job, "cancel_deadline_seconds", 120))


def max_queue_time(job: Job) -> int | None:
    """Seconds that the job may wait in the queue each time it enters it; None for ever."""
    value = _limit(job, "max_queue_time_seconds", None)
    return int(value) if value is not None else None


def max_run_time(job: Job) -> int | None:
    """Seconds that all attempts may take together; None for any time."""
    value = _limit(job, "max_run_time_seconds", None)
    return int(value) if value is not None else None


def idle_gpu_timeout(job: Job) -> int | None:
    """Seconds that all GPUs of an attempt may lie idle; None for any time."""
    value = _limit(job, "idle_gpu_timeout_seconds", None)
    return int(value) if value is not None else None


def on_stall(job: Job) -> str:
    """What a stall leads to: report, restart or fail."""
    return str(_limit(job, "on_stall", "report"))


def backoff(job: Job, restart: int) -> int:
    """Seconds of pause before the restart of this number, from 1: doubled at each."""
    base = int(_limit(job, "restart_backoff_seconds", 5))
    return min(base << min(restart - 1, 12), LONGEST_BACKOFF)
