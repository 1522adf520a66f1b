"""What supervisors send and get."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, TypeAdapter

from fp8core.spec.outcomes import Outcome, Reason
from octrain_api.logs.schemas import Level
from octrain_api.numbers import Number

Wanted = Literal["run", "pause", "cancel"]
Name = Annotated[str, Field(min_length=1, max_length=512)]


class ClaimRequest(BaseModel):
    """A supervisor takes the attempt that was placed on its node."""

    node_id: str
    supervisor: str = Field(min_length=8, max_length=128, description="a nonce of this supervisor")


class ResumeFrom(BaseModel):
    """A checkpoint to go on from."""

    artifact_id: str
    step: int
    url: str
    manifest: dict[str, Any]


class ModelFrom(BaseModel):
    """The files of another job's model, which this one begins with."""

    job: str
    url: str
    files: list[dict[str, Any]]


class Wish(BaseModel):
    """What the service wants of an attempt: part of every answer to a live one."""

    wanted: Wanted
    wanted_reason: str | None = Field(
        default=None, description="why the service wants the stop; null when a user asked"
    )
    stop_within_seconds: float | None = Field(
        default=None, description="what is left of a pause's or cancel's deadline"
    )


class DatasetFrom(BaseModel):
    """The file of an uploaded data set in the artifact store."""

    dataset: str
    url: str = Field(description="its folder")
    path: str = Field(description="its name there; the suffix says what it holds")
    size: int
    sha256: str


class Claim(Wish):
    """Everything a supervisor needs to run the attempt. All times are durations."""

    attempt_id: str
    job_id: str
    attempt: int
    fencing_token: int
    spec: dict[str, Any]
    lease_seconds: int
    lease_number: int
    heartbeat_interval_seconds: int
    artifact_prefix: str
    resume_from: ResumeFrom | None = Field(description="the first of the candidates")
    resume_candidates: list[ResumeFrom] = Field(
        default=[],
        description="checkpoints, best first; one that does not verify is told by an event record "
        'of kind "checkpoint_torn" with data.artifact_id, and the next one is tried',
    )
    model_from: ModelFrom | None = Field(
        default=None, description="for `model.source` job; null if that model is gone"
    )
    dataset_from: DatasetFrom | None = Field(
        default=None, description="for `data.source` upload; null if that data set is gone"
    )
    device: str
    gpu_indices: list[int]
    traceparent: str | None = Field(
        default=None, description="W3C trace context of the request that made the job"
    )
    roots: list[str] | None = Field(
        default=None,
        description="the folders that the job's owner may read; null: all roots of the node",
    )


class Fenced(BaseModel):
    """Every write after the claim carries the token of the claim."""

    fencing_token: int = Field(ge=0, le=2**62)


class HeartbeatRequest(Fenced):
    """The supervisor lives; what its trainer does."""

    phase: str | None = Field(default=None, max_length=64)
    step: int | None = Field(default=None, ge=0, le=2**62)
    lease_number: int | None = Field(
        default=None,
        ge=0,
        le=2**62,
        description="the lease that it holds: that of the last answer it has got. A lease that "
        "ends sooner than the one before counts only once it is named here",
    )


class HeartbeatAnswer(Wish):
    """What is wanted of the attempt, and for how long it may go on without another answer."""

    lease_seconds: int
    lease_number: int


class TelemetryRequest(Fenced):
    """Records `first_seq`, `first_seq + 1`, ... of the supervisor's own numbering."""

    first_seq: int = Field(ge=1, le=2**62)
    records: list[dict[str, Any]] = Field(max_length=20_000)


class TelemetryAnswer(Wish):
    """The last record that is stored."""

    acknowledged_seq: int


# All of them together are still a number of 64 bits.
_MOST_FILES = 100_000
_LARGEST_FILE = 2**46


class ArtifactFile(BaseModel):
    """One file of an artifact, by its path below the artifact's URL."""

    path: str = Field(min_length=1, max_length=1024)
    size: int = Field(ge=0, le=_LARGEST_FILE)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ArtifactRequest(Fenced):
    """Files that lie complete in the artifact store."""

    kind: Literal["checkpoint", "model", "report", "conversion", "log", "telemetry"]
    name: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")
    step: int | None = Field(default=None, ge=0, le=2**62)
    url: str = Field(min_length=1, max_length=4096)
    best: StrictBool = False
    metric: Number | None = Field(
        default=None, description="of a checkpoint: the evaluation loss at its step"
    )
    files: list[ArtifactFile] = Field(min_length=1, max_length=_MOST_FILES)


class ArtifactAnswer(BaseModel):
    """The registered artifact."""

    artifact_id: str


class FinishRequest(Fenced):
    """How the attempt ended."""

    outcome: Outcome
    reason: Reason
    detail: str | None = None
    step: int | None = Field(default=None, ge=0, le=2**62)
    exit_code: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)
    resumable: StrictBool = False


class FinishAnswer(BaseModel):
    """What became of the job."""

    job_status: str


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore")


class MetricsRecord(_Record):
    """Values of one step."""

    type: Literal["metrics"]
    step: int = Field(ge=0, le=2**62)
    time: Number | None = None
    tokens: int | None = Field(default=None, ge=0, le=2**62)
    values: dict[Name, Number] = Field(max_length=20_000)


class ProgressRecord(_Record):
    """How far the trainer is."""

    type: Literal["progress"]
    step: int = Field(ge=0)
    total_steps: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    eta_seconds: float | None = Field(default=None, allow_inf_nan=False)


class PhaseRecord(_Record):
    """What the trainer does now."""

    type: Literal["phase"]
    phase: str = Field(max_length=64)


class EventRecord(_Record):
    """Something that the trainer or the supervisor tells."""

    type: Literal["event"]
    kind: str = Field(max_length=64)
    message: str = Field(default="", max_length=65_536)
    data: dict[str, Any] = {}


class CheckpointRecord(_Record):
    """The trainer has written a checkpoint; it can be used once registered as an artifact."""

    type: Literal["checkpoint"]
    step: int
    path: str
    kind: str = "periodic"
    best: bool = False
    metric: Number | None = None


class ArtifactRecord(_Record):
    """The trainer has written files; they can be read once registered as an artifact."""

    type: Literal["artifact"]
    kind: str
    path: str
    step: int | None = None


class LogRecord(_Record):
    """A line of the trainer's output."""

    type: Literal["log"]
    stream: str = Field(default="stdout", max_length=32)
    time: float = Field(default=0.0, allow_inf_nan=False)
    text: str = ""
    level: Level | None = None
    rank: int | None = Field(default=None, ge=0, le=2**31 - 1)


class LostRecord(_Record):
    """A number whose record the node has lost, damaged on its disk; an event after it tells why."""

    type: Literal["lost"]


Record = Annotated[
    MetricsRecord
    | ProgressRecord
    | PhaseRecord
    | EventRecord
    | CheckpointRecord
    | ArtifactRecord
    | LogRecord
    | LostRecord,
    Field(discriminator="type"),
]
record_adapter: TypeAdapter[Record] = TypeAdapter(Record)
