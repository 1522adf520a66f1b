"""What the server answers, as typed objects.

Servers may be newer than the client: unknown fields are kept (``model_extra``), and every
enumeration is a plain string, so that a new value breaks nobody.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: Any) -> float:
    """JSON has no NaN and no infinity: they travel as strings. A missing value is NaN."""
    return math.nan if value is None else float(value)


Number = Annotated[float, BeforeValidator(_number)]


class Answer(BaseModel):
    """What all answers share."""

    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="strings")


class Problem(Answer):
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


class Progress(Answer):
    """How far a job is; ``eta_seconds`` is the trainer's own estimate."""

    step: int = 0
    total_steps: int | None = None
    tokens: int = 0
    eta_seconds: float | None = None


class Attempt(Answer):
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


class JobData(Answer):
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
    restarts: int = 0
    recipe_from: dict[str, Any] | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    spec: dict[str, Any] = Field(default_factory=dict)
    # Of the spec, what was written; None in lists, and from servers that do not keep it.
    spec_given: dict[str, Any] | None = None
    links: dict[str, str] = Field(default_factory=dict)


class JobPart(Answer):
    """Those members of a job that were asked for, beside its id; the others are None."""

    id: str
    name: str | None = None
    labels: dict[str, str] | None = None
    notes: str | None = None
    priority: int | None = None
    owner: str | None = None
    status: str | None = None
    is_final: bool | None = None
    reason: str | None = None
    detail: str | None = None
    progress: Progress | None = None
    latest_metrics: dict[str, Number] | None = None
    attempts: list[Attempt] | None = None
    attempt: int | None = None
    restarts: int | None = None
    waiting_for: str | None = None
    queue_position: int | None = None
    device: str | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    spec: dict[str, Any] | None = None


class MetricValue(Answer):
    """The newest value of one metric."""

    name: str
    attempt: int | None = None
    step: int = 0
    value: Number
    first_step: int | None = None
    points: int = 0


class LogLine(Answer):
    """One line that the trainer printed; ``time`` as the server gives it."""

    seq: int
    time: Any = None
    stream: str = "stdout"
    attempt: int | None = None
    rank: int | None = None
    level: str | None = None
    text: str


class ArtifactFile(Answer):
    """One file of an artifact; ``size`` in bytes."""

    path: str
    size: int
    sha256: str


class Artifact(Answer):
    """Something a job made: a checkpoint, the model, a report."""

    id: str
    kind: str
    name: str = ""
    step: int | None = None
    size: int | None = None
    best: bool | None = None
    url: str | None = None
    attempt: int | None = None
    created_at: datetime | None = None
    files: list[ArtifactFile] = Field(default_factory=list)


class Node(Answer):
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
    gpus_used: list[int] = Field(default_factory=list)
    unreachable_since: datetime | None = None
    quarantined_since: datetime | None = None
    quarantine_detail: str | None = None
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def engine_works(self, name: str) -> bool:
        """Whether the node says that it can train with this precision engine."""
        return bool(self.engines.get(name, {}).get("ok"))


class NodeSample(Answer):
    """What a node did at a time: shares from 0 to 1, bytes, watts, degrees Celsius."""

    time: datetime
    host: dict[str, Any] = Field(default_factory=dict)
    gpus: list[dict[str, Any]] = Field(default_factory=list)


class Readiness(Answer):
    """``status`` is ready, degraded (jobs are taken, but may wait) or not ready; ``checks`` tells
    of each part of the service ``ok``, or what is wrong with it."""

    status: str
    checks: dict[str, str] = Field(default_factory=dict)


class JobEvent(Answer):
    """One entry of a job's history."""

    seq: int
    time: datetime | None = None
    kind: str = ""
    actor: str | None = None
    message: str = ""
    attempt: int | None = None
    data: dict[str, Any] = Field(default_factory=dict)


class NodeFit(Answer):
    """Whether a node could run a job, and if not why."""

    node: str
    fits: bool
    reason: str | None = None
    is_live: bool = False
    free: bool = False


class Advice(Answer):
    """Something that is allowed, and probably not what was meant."""

    code: str = ""
    message: str
    pointer: str | None = None


class TimeEstimate(Answer):
    """How long a training takes, by what jobs like it did."""

    tokens_per_second: float
    seconds: float
    from_jobs: list[str] = Field(default_factory=list)
    device: str | None = None


class ValidationReport(Answer):
    """All that can be known of a job before it is submitted; ``spec`` has every default."""

    valid: bool
    errors: list[Problem] = Field(default_factory=list)
    warnings: list[Advice] = Field(default_factory=list)
    spec: dict[str, Any] | None = None
    recipe_from: dict[str, Any] | None = None
    nodes: list[NodeFit] = Field(default_factory=list)
    plan_status: str = ""
    plan_detail: str | None = None
    plan: dict[str, Any] | None = None
    time: TimeEstimate | None = None


class CancelResult(Answer):
    """What became of one job of a bulk cancel; ``problem`` where it could not be cancelled."""

    job_id: str
    status: str | None = None
    problem: str | None = None


class StreamEvent(Answer):
    """One event of a stream. ``type`` is status, event, progress, metrics, log, or end; ``gap``
    tells that metrics were left out, ``reset`` that more was: read the job anew.

    ``id`` is what to come back with: a number in a job's stream.
    """

    id: int | str | None = None
    type: str
    data: dict[str, Any] = Field(default_factory=dict)
