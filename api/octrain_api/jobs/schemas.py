"""What the job endpoints take and give."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from octrain_api.jobs.transitions import Status
from octrain_api.pagination import Page

EXAMPLE_SPEC: dict[str, Any] = {
    "name": "first-fp8-run",
    "labels": {"team": "nlp"},
    "model": {
        "source": "config",
        "config": {
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    },
    "data": {"source": "builtin", "name": "python_topics"},
    "recipe": {
        "engine": "emulated",
        "scaling": "delayed",
        "fp8_format": "HYBRID",
        "amax_history_len": 16,
        "amax_compute_algo": "max",
    },
    "training": {"steps": 50, "batch_size": 4, "sequence_length": 64},
}


class Progress(BaseModel):
    """How far a job is, as its trainer last said."""

    step: int
    total_steps: int | None
    tokens: int
    eta_seconds: float | None = Field(description="seconds left, as the trainer estimates")


class AttemptSummary(BaseModel):
    """One run of the job on one node."""

    id: str
    number: int
    node: str = Field(description="the node's name")
    status: str = Field(description="placed, running or ended")
    phase: str | None = Field(description="what the trainer last said it was doing")
    device: str
    created_at: datetime
    started_at: datetime | None = Field(description="when a supervisor claimed it")
    ended_at: datetime | None
    outcome: str | None
    reason: str | None
    detail: str | None
    step: int | None
    stalled_since: datetime | None = Field(
        description="when its step or phase last changed, if that is longer ago than it may be"
    )
    unreachable_since: datetime | None


class JobObject(BaseModel):
    """A job and everything that a row of a dashboard shows."""

    id: str
    name: str | None
    labels: dict[str, str]
    notes: str
    priority: int
    owner: str
    status: Status
    is_final: bool
    reason: str | None = Field(
        description="why a final job ended, or why the service pauses or cancels it"
    )
    detail: str | None = Field(description="the reason, for a person")
    progress: Progress
    latest_metrics: dict[str, float | str] = Field(
        description='newest value of each metric; "NaN", "Infinity" and "-Infinity" are strings'
    )
    attempts: list[AttemptSummary]
    attempt: int = Field(description="number of the current or last attempt, 0 before the first")
    restarts: int = Field(description="restarts used, of limits.max_restarts")
    waiting_for: str | None = Field(description="what a queued job waits for, as of `queue_as_of`")
    queue_position: int | None = Field(
        description="1 for the next one, at this moment; null when not queued, and behind the "
        "first 1,000"
    )
    queue_as_of: datetime | None = Field(
        description="the tick of the scheduler that found it, about 10 s ago at most while the "
        "controller runs; null when not queued, or not looked at yet"
    )
    next_attempt_at: datetime | None = Field(description="a restart's pause lasts until then")
    stop_deadline_at: datetime | None = Field(
        description="when a pausing or cancelling job's attempt is ended by force"
    )
    version: int = Field(
        description="rises with every visible change but those of waiting_for and queue_*"
    )
    last_event: int = Field(description="the newest id of the job's stream")
    device: str | None = Field(description="the device kind chosen at placement")
    created_at: datetime
    started_at: datetime | None = Field(description="when its training first began")
    ended_at: datetime | None
    spec: dict[str, Any] = Field(description="the spec with every default filled in")
    recipe_from: dict[str, Any] | None = Field(
        description="the named recipe that the spec was made with: its name and version"
    )
    links: dict[str, str]


class JobDetail(JobObject):
    """A job that was asked for by itself."""

    spec_given: dict[str, Any] | None = Field(
        description="what was written of the spec, by whoever made the job, cloned it or changed "
        "it, in canonical spelling; what is in `spec` beside it is a default, of a named recipe, "
        "or filled in by the service. Null for jobs of versions that did not keep it"
    )


class JobList(Page):
    """One page of jobs, newest first."""

    items: list[JobObject]


class JobPart(BaseModel):
    """The members of a job that `fields` asked for, beside its id; as in JobObject."""

    model_config = ConfigDict(extra="allow")

    id: str


class JobParts(Page):
    """One page of parts of jobs."""

    items: list[JobPart]


class JobChanges(BaseModel):
    """What to change of a job; what is left out stays."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"labels": {"team": "nlp", "old": None}, "priority": 10}]},
    )

    name: str | None = None
    labels: dict[str, str | None] = Field(
        default={}, description="merged with the job's; null removes a label"
    )
    notes: str = ""
    priority: int = Field(default=0, strict=True)
    spec: dict[str, Any] = Field(
        default={}, description="merge patch (RFC 7396) over the spec of a draft"
    )


class CancelRequest(BaseModel):
    """Which jobs to cancel: named ones, or those that all the filters find."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"labels": {"team": "nlp"}}]}
    )

    ids: list[Annotated[str, Field(max_length=64)]] | None = Field(
        default=None, min_length=1, max_length=500
    )
    status: list[Status] | None = Field(default=None, description="of unfinished jobs only")
    labels: dict[str, str] | None = None
    name: str | None = None
    every: bool = Field(
        default=False, strict=True, description="true to cancel all of your unfinished jobs"
    )


class CancelResult(BaseModel):
    """What became of one job."""

    job_id: str
    status: Status | None = Field(description="null where it could not be cancelled")
    problem: str | None


class CancelResults(BaseModel):
    """At most 500 jobs; ask again while `more` is true."""

    items: list[CancelResult]
    more: bool
