"""How a run ended, as ``result.json`` says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8core.durable import is_full, write_json
from fp8core.errors import OutOfMemory, StorageFull, TrainingError, exit_code_of
from fp8core.spec.outcomes import Outcome, Reason

__all__ = ["RunResult", "as_training_error"]


@dataclass(frozen=True)
class RunResult:
    """The end of a run: what became of it, why, and at which step.

    Of a run of several ``ranks``: ``rank`` decided it, if one did; ``signal`` names what ended that
    rank, and ``code`` is its exit status (128 and the signal's number) where the rank itself could
    not say more.
    """

    outcome: Outcome
    reason: Reason
    detail: str
    step: int
    ranks: int = 1
    rank: int | None = None
    signal: str | None = None
    code: int | None = None

    @property
    def exit_code(self) -> int:
        return int(exit_code_of(self.reason)) if self.code is None else self.code

    def to_json(self) -> dict[str, Any]:
        of_ranks = {"ranks": self.ranks, "rank": self.rank, "signal": self.signal}
        return {
            "outcome": self.outcome.value,
            "reason": self.reason.value,
            "detail": self.detail,
            "step": self.step,
            "exit_code": self.exit_code,
            **(of_ranks if self.ranks > 1 else {}),
        }

    def write(self, path: Path) -> None:
        """Writes it as a whole. Raises ``StorageFull``."""
        write_json(path, self.to_json())

    @classmethod
    def failed(cls, error: TrainingError, step: int) -> RunResult:
        return cls(Outcome.FAILED, error.reason, error.line, step)


def as_training_error(error: BaseException) -> TrainingError | None:
    """``error`` as one that a caller can act on; None for a fault of the program."""
    if isinstance(error, TrainingError):
        return error
    text = str(error)
    if isinstance(error, MemoryError):
        return OutOfMemory("the host ran out of memory")
    if isinstance(error, OSError) and is_full(error):
        return StorageFull(f"no room left on the disk: {text}")
    names = {kind.__name__ for kind in type(error).__mro__}  # without importing torch
    if "OutOfMemoryError" in names:
        return OutOfMemory(text.splitlines()[0])
    if isinstance(error, RuntimeError) and "can't allocate memory" in text:
        return OutOfMemory(f"the host ran out of memory: {text.splitlines()[0]}")
    return None
