"""How far a run has come: all that the loop itself must remember to go on exactly."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Position"]

_RECENT = 10


@dataclass
class Position:
    """Mutable; saved with every checkpoint as JSON, whose numbers come back bit for bit."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on, without padding."""
    seconds: float = 0.0
    """Time spent in training steps, over all runs of this workdir that counted."""
    evaluated_step: int = 0
    """The last step after which the model was evaluated; 0: never."""
    last_evaluation: dict[str, float] = field(default_factory=dict)
    best_loss: float | None = None
    """Lowest evaluation loss so far, and where."""
    best_step: int = 0
    waited: int = 0
    """Evaluations in a row that did not improve enough (early stopping)."""
    reference_loss: float | None = None
    """What the next evaluation must beat by ``min_delta`` (early stopping)."""
    first_loss: float | None = None
    recent_losses: list[float] = field(default_factory=list)
    """Training losses of the last ten steps, oldest first."""
    skipped: int = 0
    """Steps that changed nothing because their loss or gradients were not finite."""
    skipped_in_a_row: int = 0
    fallback: dict[str, str] = field(default_factory=dict)
    """Converted layers that were put back into high precision, by name, and why."""
    small_gemms: dict[str, str] | None = None
    """Layers that the small-GEMM rule kept in bf16 when the job began, by name, and why. They stay
    there wherever the job goes on: the engine's state is that of the others."""
    parity: dict[str, Any] | None = None
    """Losses of the reference and of this run; see ``fp8core.training.parity``."""

    def note_loss(self, loss: float) -> None:
        if self.first_loss is None:
            self.first_loss = loss
        self.recent_losses = [*self.recent_losses, loss][-_RECENT:]

    def note_evaluation(self, figures: dict[str, float], min_delta: float) -> bool:
        """Takes an evaluation at the present step into account; whether it is the best so far."""
        loss = figures["eval/loss"]
        self.evaluated_step = self.step
        self.last_evaluation = dict(figures)
        if self.reference_loss is None or loss < self.reference_loss - min_delta:
            self.reference_loss = loss
            self.waited = 0
        else:
            self.waited += 1
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss = loss
            self.best_step = self.step
            return True
        return False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Position:
        return cls(**state)
