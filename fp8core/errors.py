"""The errors a training run can end with, each with the reason and exit code a caller acts on.

Every one is written for a person: the message says what was wrong and where, the pointer (a JSON
pointer into the spec) says which field asked for it. Anything that is not a ``TrainingError`` is a
fault of the program itself.
"""

from __future__ import annotations

from typing import ClassVar

from fp8core.spec.outcomes import ExitCode, Reason

__all__ = [
    "CheckpointCorrupt",
    "DataInvalid",
    "Diverged",
    "EngineUnsupported",
    "ModelUnavailable",
    "OutOfMemory",
    "RankLost",
    "SpecRefused",
    "StorageFull",
    "TrainingError",
    "exit_code_of",
]

_EXIT_CODES: dict[Reason, ExitCode] = {
    Reason.SPEC_INVALID: ExitCode.SPEC_INVALID,
    Reason.DATA_INVALID: ExitCode.DATA_INVALID,
    Reason.MODEL_UNAVAILABLE: ExitCode.MODEL_UNAVAILABLE,
    Reason.ENGINE_UNSUPPORTED: ExitCode.ENGINE_UNSUPPORTED,
    Reason.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    Reason.DIVERGED: ExitCode.DIVERGED,
    Reason.CHECKPOINT_CORRUPT: ExitCode.CHECKPOINT_CORRUPT,
    Reason.STORAGE_FULL: ExitCode.STORAGE_FULL,
    Reason.STOPPED_BY_REQUEST: ExitCode.STOPPED,
    Reason.COMPLETED: ExitCode.OK,
    Reason.EARLY_STOPPED: ExitCode.OK,
}


def exit_code_of(reason: Reason) -> ExitCode:
    """The exit code of a trainer that ends for ``reason``; INTERNAL_ERROR for all without one."""
    return _EXIT_CODES.get(reason, ExitCode.INTERNAL_ERROR)


class TrainingError(Exception):
    """A run cannot start or go on, for a reason outside the program.

    ``reason`` is what a service stores, ``pointer`` the JSON pointer of the spec's field at fault
    ("" is the whole spec, None where no field is). ``rank``: the rank at fault, where one of
    several is and the others raise the same.
    """

    default_reason: ClassVar[Reason] = Reason.INTERNAL_ERROR
    rank: int | None = None

    def __init__(
        self, message: str, *, reason: Reason | None = None, pointer: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason if reason is not None else self.default_reason
        self.pointer = pointer

    @property
    def exit_code(self) -> ExitCode:
        return exit_code_of(self.reason)

    @property
    def line(self) -> str:
        """One line for a person: ``/data/path: no such file``."""
        text = " ".join(self.message.split())
        return f"{self.pointer}: {text}" if self.pointer else text

    def __str__(self) -> str:
        return self.line


class SpecRefused(TrainingError):
    """The spec is well formed but asks for what may not or cannot be done here."""

    default_reason = Reason.SPEC_INVALID


class DataInvalid(TrainingError):
    """The data cannot be read as the spec says; the message names file and line."""

    default_reason = Reason.DATA_INVALID


class ModelUnavailable(TrainingError):
    """The model or tokenizer is missing, unreadable or not what its config says."""

    default_reason = Reason.MODEL_UNAVAILABLE


class EngineUnsupported(TrainingError):
    """This machine, or this version of the engine, cannot do what the recipe asks."""

    default_reason = Reason.ENGINE_UNSUPPORTED


class OutOfMemory(TrainingError):
    """The device or the host ran out of memory."""

    default_reason = Reason.OUT_OF_MEMORY


class Diverged(TrainingError):
    """The loss stopped being a finite number."""

    default_reason = Reason.DIVERGED


class CheckpointCorrupt(TrainingError):
    """Checkpoints exist and none of them verifies."""

    default_reason = Reason.CHECKPOINT_CORRUPT


class RankLost(TrainingError):
    """An exchange with the other ranks broke off or took too long: one of them is gone."""

    default_reason = Reason.TRAINER_CRASHED


class StorageFull(TrainingError):
    """A file could not be written because the disk or a quota is full."""

    default_reason = Reason.STORAGE_FULL
