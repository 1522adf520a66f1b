"""How an attempt ended: one outcome and one reason, from all that is known about it.

What the trainer says of itself (result.json) comes first, then what was asked of it, then its exit
code or the signal that ended it. Where that is no more than "it crashed", the words it left tell
what it was. ``resumable`` says whether running the job again from its newest checkpoint can help:
not after bad data, but after a crash or a lost worker.
"""

from __future__ import annotations

import re
import signal
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from fp8core.spec.outcomes import ExitCode, Outcome, Reason
from octrain_worker.supervisor.failure import Failure, find_failure

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
    ``killed`` says that the supervisor itself had to kill it; ``crash_log`` is the traceback that
    the trainer left of an exception it did not expect; ``free_bytes`` is what was free in its work
    folder at its end.
    """

    result: dict[str, Any] | None
    status: int | None
    cause: StopCause | None = None
    cause_reason: str | None = None
    killed: bool = False
    host_out_of_memory: bool = False
    step: int | None = None
    log_tail: str = ""
    crash_log: str = ""
    free_bytes: int | None = None

    @property
    def disk_was_full(self) -> bool:
        return self.free_bytes is not None and self.free_bytes < _FULL_BYTES


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
    def from_json(cls, value: dict[str, Any] | None) -> Verdict | None:
        """What ``as_json`` made; None for anything else, as what a disk has damaged."""
        if value is None:
            return None
        try:
            return cls(
                outcome=Outcome(value["outcome"]),
                reason=Reason(value["reason"]),
                detail=_words(value["detail"]),
                step=_number(value["step"], 0, _LARGEST_STEP),
                exit_code=_number(value["exit_code"], -_LARGEST_CODE, _LARGEST_CODE),
                resumable=value["resumable"] is True,
            )
        except (KeyError, ValueError):
            return None

    def in_plain_words(self, refusal: str) -> Verdict:
        """The same for an API that does not understand it, being older than this worker perhaps:
        with the most general reason. Without an end the attempt would keep its place for ever."""
        return replace(
            self,
            reason=_PLAIN_REASONS[self.outcome],
            detail=f"{self.reason}: {self.detail}\nTold as {_PLAIN_REASONS[self.outcome]}, for the "
            f"API did not take that: {refusal}",
            step=None,
            exit_code=None,
        )


_PLAIN_REASONS = {
    Outcome.SUCCEEDED: Reason.COMPLETED,
    Outcome.FAILED: Reason.INTERNAL_ERROR,
    Outcome.STOPPED: Reason.STOPPED_BY_REQUEST,
}
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
_RESUMABLE = frozenset(
    {
        Reason.WORKER_LOST,
        Reason.TRAINER_CRASHED,
        Reason.STOPPED_BY_REQUEST,
        Reason.OUT_OF_MEMORY,
        Reason.CUDA_ERROR,
        Reason.COMMUNICATION_ERROR,
        Reason.HARDWARE_FAULT,
    }
)
# Reasons that only say that something broke: what it was is looked for.
_VAGUE = frozenset({Reason.INTERNAL_ERROR, Reason.TRAINER_CRASHED})
# Failures whose last lines tell more than their one sentence.
_WITH_LOG = _VAGUE | {
    Reason.STORAGE_FULL,
    Reason.OUT_OF_MEMORY,
    Reason.CUDA_ERROR,
    Reason.COMMUNICATION_ERROR,
    Reason.HARDWARE_FAULT,
}
# torchrun's words for a rank that was ended by a signal; it itself then ends with code 1.
_RANK_SIGNALLED = re.compile(r"exitcode\s*: -(\d+)\b")
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
_MAX_DETAIL = 34_000
# What the API takes for a step and for an exit code.
_LARGEST_STEP = 2**62
_LARGEST_CODE = 2**31 - 1
# With less, not even a line is written by a file system of larger blocks.
_FULL_BYTES = 64 << 10


def classify(ending: Ending) -> Verdict:
    """The verdict on an attempt whose trainer is gone."""
    said = _said(ending)
    if said is not None and said.outcome is Outcome.SUCCEEDED:
        return said
    if ending.cause is StopCause.CANCEL:
        return _stopped(ending, said)
    if said is not None and said.outcome is Outcome.FAILED:
        words = f"{said.detail}\n{ending.crash_log}"
        if (ending.result or {}).get("signal") == "SIGABRT":
            # A rank that ended itself, as NCCL's watchdog does: its words are in the log alone.
            words += f"\n{ending.log_tail}"
        return _explained(ending, said, words)
    if ending.cause is not None:
        return _stopped(ending, said)
    if said is not None:
        return said
    verdict = _unsaid(ending)
    return _explained(ending, verdict, f"{ending.log_tail}\n{ending.crash_log}")


def _explained(ending: Ending, verdict: Verdict, words: str) -> Verdict:
    """The verdict with what ``words`` tell of a failure that was named only vaguely, and with the
    last lines of the log."""
    if verdict.outcome is not Outcome.FAILED:
        return verdict
    reason, detail = verdict.reason, verdict.detail
    failure = find_failure(words) if reason in _VAGUE else None
    if failure is not None and failure.reason is Reason.COMMUNICATION_ERROR:
        # Another rank, which wrote into the same log, may have failed first.
        failure = find_failure(f"{words}\n{ending.log_tail}") or failure
    if failure is None and reason in _VAGUE and ending.disk_was_full:
        # With no room even for its last words.
        failure = Failure(Reason.STORAGE_FULL, "a disk is full", "the one of its work folder")
    if failure is not None:
        reason = failure.reason
        detail = f"{failure.what}: {failure.line}" + (f"\n{detail}" if detail else "")
    if reason is Reason.STORAGE_FULL and ending.free_bytes is not None:
        detail = f"{detail.rstrip('.')}. At its end {ending.free_bytes:,} bytes were free"
    if reason in _WITH_LOG and ending.log_tail:
        detail = _with_log(detail, ending.log_tail)
    resumable = verdict.resumable if failure is None else reason in _RESUMABLE
    return replace(verdict, reason=reason, detail=detail[:_MAX_DETAIL], resumable=resumable)


def _with_log(detail: str, log: str) -> str:
    """Where there is not room for all of it, the end of the log stays: it says why."""
    head = f"{detail.rstrip('.')[: _MAX_DETAIL // 4]}. Its last lines:\n"
    return head + log[-(_MAX_DETAIL - len(head)) :]


def _said(ending: Ending) -> Verdict | None:
    """What result.json says, if it is one."""
    result = ending.result
    if result is None:
        return None
    try:
        outcome, reason = Outcome(result["outcome"]), Reason(result["reason"])
    except (KeyError, ValueError):
        return None
    step, detail = _number(result.get("step"), 0, _LARGEST_STEP), _words(result.get("detail"))
    code = _number(result.get("exit_code"), -_LARGEST_CODE, _LARGEST_CODE)
    if result.get("signal") == "SIGKILL" and ending.host_out_of_memory:
        # Of one of several ranks: their launcher cannot know who sent it.
        reason = Reason.OUT_OF_MEMORY
        detail += ": the node's memory (or its cgroup's) was exhausted, and the kernel killed it"
    return Verdict(
        outcome=outcome,
        reason=reason,
        detail=detail[:_MAX_DETAIL],
        step=step if step is not None else ending.step,
        exit_code=ending.status if ending.status is not None else code,
        resumable=outcome is not Outcome.SUCCEEDED and reason in _RESUMABLE,
    )


def _number(value: Any, least: int, largest: int) -> int | None:
    """The number, where it is one that the API takes."""
    return value if type(value) is int and least <= value <= largest else None


def _words(value: Any) -> str:
    """The text as it can be sent: half a surrogate pair cannot."""
    return str(value or "").encode("utf-8", "replace").decode()


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
        detail = "the supervisor on the node died, and the trainer with it"
        return _failed(ending, Reason.WORKER_LOST, detail)
    number, who = -status, "the trainer"
    rank = _RANK_SIGNALLED.search(ending.log_tail)
    if status == 1 and rank is not None:
        number, who = int(rank[1]), "a rank of the trainer"
    if number == signal.SIGKILL and ending.host_out_of_memory:
        detail = f"the kernel killed {who}: the node's memory (or its cgroup's) was exhausted"
        return _failed(ending, Reason.OUT_OF_MEMORY, detail)
    if number > 0:
        detail = f"{who} was ended by {_signal_name(number)}"
        return _failed(ending, Reason.TRAINER_CRASHED, detail)
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
        return _failed(ending, Reason.INTERNAL_ERROR, detail)
    reason = _REASON_OF_CODE.get(status, Reason.TRAINER_CRASHED)
    detail = f"the trainer ended with exit code {status} and left no result"
    return _failed(ending, reason, detail)


def _failed(ending: Ending, reason: Reason, detail: str) -> Verdict:
    return Verdict(
        Outcome.FAILED, reason, detail, ending.step, ending.status, resumable=reason in _RESUMABLE
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
