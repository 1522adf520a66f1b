"""How an attempt ended: one outcome and one reason, from all that is known about it.

What the trainer says of itself (result.json) comes first, then what was asked of it, then its exit
code or the signal that ended it. ``resumable`` says whether running the job again from its newest
checkpoint can help: not after bad data, but after a crash or a lost worker.
"""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from fp8core.spec.outcomes import ExitCode, Outcome, Reason

__all__ = ["Ending", "StopCause", "Verdict", "classify"]


class StopCause(StrEnum):
    """Why the supervisor stops a trainer."""

    CANCEL = "cancel"
    PAUSE = "pause"
    SHUTDOWN = "shutdown"
    LEASE = "lease"


@dataclass(frozen=True)
class Ending:
    """What is known at the end.

    ``status`` is the trainer's exit code, negative for a signal, None when nobody was there to see;
    ``cause`` why it was told to stop, with the service's ``cause_reason``, where it had one;
    ``killed`` says that the supervisor itself had to kill it.
    """

    result: dict[str, Any] | None
    status: int | None
    cause: StopCause | None = None
    cause_reason: str | None = None
    killed: bool = False
    host_out_of_memory: bool = False
    step: int | None = None
    log_tail: str = ""


@dataclass(frozen=True)
class Verdict:
    """The body of ``finish``, without the fencing token."""

    outcome: Outcome
    reason: Reason
    detail: str
    step: int | None
    exit_code: int | None
    resumable: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Verdict:
        outcome, reason = Outcome(value["outcome"]), Reason(value["reason"])
        return cls(**{**value, "outcome": outcome, "reason": reason})


_REASON_OF_CODE: dict[int, Reason] = {
    ExitCode.INTERNAL_ERROR: Reason.INTERNAL_ERROR,
    ExitCode.SPEC_INVALID: Reason.SPEC_INVALID,
    ExitCode.DATA_INVALID: Reason.DATA_INVALID,
    ExitCode.MODEL_UNAVAILABLE: Reason.MODEL_UNAVAILABLE,
    ExitCode.ENGINE_UNSUPPORTED: Reason.ENGINE_UNSUPPORTED,
    ExitCode.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    ExitCode.DIVERGED: Reason.DIVERGED,
    ExitCode.CHECKPOINT_CORRUPT: Reason.CHECKPOINT_CORRUPT,
    ExitCode.STORAGE_FULL: Reason.STORAGE_FULL,
}
_RESUMABLE = frozenset({Reason.WORKER_LOST, Reason.TRAINER_CRASHED, Reason.STOPPED_BY_REQUEST})
_OF_CAUSE = {
    StopCause.CANCEL: (Outcome.STOPPED, Reason.CANCELLED_BY_USER, "cancelled"),
    StopCause.PAUSE: (Outcome.STOPPED, Reason.STOPPED_BY_REQUEST, "stopped to pause the job"),
    StopCause.SHUTDOWN: (
        Outcome.STOPPED,
        Reason.STOPPED_BY_REQUEST,
        "stopped because the node shuts down",
    ),
    StopCause.LEASE: (
        Outcome.FAILED,
        Reason.WORKER_LOST,
        "stopped by its own node: the API could not be reached before the lease ended",
    ),
}
_MAX_DETAIL = 16_000


def classify(ending: Ending) -> Verdict:
    """The verdict on an attempt whose trainer is gone."""
    said = _said(ending)
    if said is not None and said.outcome is Outcome.SUCCEEDED:
        return said
    if ending.cause is StopCause.CANCEL:
        return _stopped(ending, said)
    if said is not None and said.outcome is Outcome.FAILED:
        return said
    if ending.cause is not None:
        return _stopped(ending, said)
    if said is not None:
        return said
    return _unsaid(ending)


def _said(ending: Ending) -> Verdict | None:
    """What result.json says, if it is one."""
    result = ending.result
    if result is None:
        return None
    try:
        outcome, reason = Outcome(result["outcome"]), Reason(result["reason"])
    except (KeyError, ValueError):
        return None
    step = result.get("step")
    return Verdict(
        outcome=outcome,
        reason=reason,
        detail=str(result.get("detail") or "")[:_MAX_DETAIL],
        step=step if isinstance(step, int) else ending.step,
        exit_code=ending.status if ending.status is not None else result.get("exit_code"),
        resumable=outcome is not Outcome.SUCCEEDED and reason in _RESUMABLE,
    )


def _stopped(ending: Ending, said: Verdict | None) -> Verdict:
    assert ending.cause is not None
    outcome, reason, detail = _OF_CAUSE[ending.cause]
    if ending.cause_reason is not None:
        detail += f" ({ending.cause_reason})"
    if ending.killed:
        detail += "; it did not end in time and was killed"
    if said is not None and said.outcome is Outcome.FAILED:
        detail += f"; the trainer itself had failed ({said.reason}): {said.detail}"
    step = said.step if said is not None else ending.step
    return Verdict(
        outcome,
        reason,
        detail[:_MAX_DETAIL],
        step,
        ending.status,
        resumable=ending.cause is not StopCause.CANCEL,
    )


def _unsaid(ending: Ending) -> Verdict:
    """The trainer left no result: it was killed, or crashed."""
    status = ending.status
    if status is None:
        return _failed(
            ending,
            Reason.WORKER_LOST,
            "the supervisor on the node died, and the trainer with it",
            resumable=True,
        )
    if status < 0:
        name = _signal_name(-status)
        if status == -signal.SIGKILL and ending.host_out_of_memory:
            return _failed(
                ending,
                Reason.OUT_OF_MEMORY,
                "the kernel killed the trainer: the node's memory (or its cgroup's) was exhausted",
                resumable=True,
                with_log=True,
            )
        return _failed(
            ending,
            Reason.TRAINER_CRASHED,
            f"the trainer was ended by {name}",
            resumable=True,
            with_log=True,
        )
    if status == ExitCode.STOPPED:
        return Verdict(
            Outcome.STOPPED,
            Reason.STOPPED_BY_REQUEST,
            "the trainer stopped when asked by someone on its node",
            ending.step,
            status,
            resumable=True,
        )
    if status == ExitCode.OK:
        detail = "the trainer ended without an error, but left no result"
        return _failed(ending, Reason.INTERNAL_ERROR, detail, resumable=False, with_log=True)
    reason = _REASON_OF_CODE.get(status, Reason.TRAINER_CRASHED)
    detail = f"the trainer ended with exit code {status} and left no result"
    return _failed(ending, reason, detail, resumable=reason in _RESUMABLE, with_log=True)


def _failed(
    ending: Ending, reason: Reason, detail: str, *, resumable: bool, with_log: bool = False
) -> Verdict:
    if with_log and ending.log_tail:
        detail = f"{detail}. Its last lines:\n{ending.log_tail}"
    return Verdict(
        Outcome.FAILED, reason, detail[:_MAX_DETAIL], ending.step, ending.status, resumable
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
