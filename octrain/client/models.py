"""What the server answers, as typed objects.

Servers may be newer than the client: unknown fields are kept (``model_extra``), and every
enumeration is a plain string, so that a new value breaks nobody.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

if TYPE_CHECKING:
    import numpy as np


def _number(value: Any) -> float:
    """JSON has no NaN and no infinity: they travel as strings. A missing value is NaN."""
    return math.nan if value is None else float(value)


Number = Annotated[float, BeforeValidator(_number)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="strings")


class Problem(_Answer):
    """One thing that is wrong in a request, with its place."""

    pointer: str = ""
    message: str = ""
    code: str = ""
    suggestion: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        text = f"{self.pointer or '/'}: {self.message}"
        if self.suggestion and self.suggestion not in self.message:
            text += f" Did you mean {self.suggestion!r}?"
        return text


class Progress(_Answer):
    """How far a job is; ``eta_seconds`` is the trainer's own estimate."""

    step: int = 0
    total_steps: int | None = None
    tokens: int = 0
    eta_seconds: float | None = None


class Attempt(_Answer):
    """One run of a job on one node."""

    id: str
    number: int
    node: str | None = None
    status: str = ""
    phase: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    reason: str | None = None
    detail: str | None = None


class JobData(_Answer):
    """A job as the server last told it."""

    id: str
    name: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    notes: str = ""
    priority: int = 0
    owner: str | None = None
    status: str
    is_final: bool
    reason: str | None = None
    detail: str | None = None
    progress: Progress = Field(default_factory=Progress)
    latest_metrics: dict[str, Number] = Field(default_factory=dict)
    attempts: list[Attempt] = Field(default_factory=list)
    attempt: int | None = None
    waiting_for: str | None = None
    queue_position: int | None = None
    version: int = 0
    last_event: int = 0
    device: str | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    spec: dict[str, Any] = Field(default_factory=dict)
    links: dict[str, str] = Field(default_factory=dict)


class Series(_Answer):
    """One metric of one attempt, as ``(step, value)`` pairs in the order of the steps."""

    name: str
    attempt: int | None = None
    points: list[tuple[int, Number]] = Field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.points]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    def to_numpy(self) -> np.ndarray:
        """float64 array of shape [points, 2]: step, value. Needs numpy."""
        import numpy as np

        return np.asarray(self.points, dtype=np.float64).reshape(-1, 2)


class LogLine(_Answer):
    """One line that the trainer printed; ``time`` as the server gives it."""

    seq: int
    time: Any = None
    stream: str = "stdout"
    attempt: int | None = None
    rank: int | None = None
    level: str | None = None
    text: str


class ArtifactFile(_Answer):
    """One file of an artifact; ``size`` in bytes."""

    path: str
    size: int
    sha256: str


class Artifact(_Answer):
    """Something a job made: a checkpoint, the model, a report."""

    id: str
    kind: str
    name: str = ""
    step: int | None = None
    size: int | None = None
    best: bool | None = None
    url: str | None = None
    attempt: int | None = None
    files: list[ArtifactFile] = Field(default_factory=list)


class Node(_Answer):
    """A machine that runs jobs."""

    id: str
    name: str
    live: bool = False
    wanted: str = "run"
    hostname: str | None = None
    version: str | None = None
    device_kinds: list[str] = Field(default_factory=list)
    cpu_slots: int = 0
    cpu_slots_used: int = 0
    gpus: list[dict[str, Any]] = Field(default_factory=list)
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def engine_works(self, name: str) -> bool:
        """Whether the node says that it can train with this precision engine."""
        return bool(self.engines.get(name, {}).get("ok"))


class StreamEvent(_Answer):
    """One event of a stream. ``type`` is status, event, progress, metrics, log, or end; ``gap``
    tells that metrics were left out, ``reset`` that more was: read the job anew.

    ``id`` is what to come back with: a number in a job's stream.
    """

    id: int | str | None = None
    type: str
    data: dict[str, Any] = Field(default_factory=dict)
