"""What nodes say of themselves, and what readers see of them."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=512, pattern=r"^[^\x00]*$")]

# `false` is no number, and 1 no truth.
_STRICT = ConfigDict(strict=True)


class Gpu(BaseModel):
    """One CUDA device."""

    model_config = _STRICT

    index: int = Field(ge=0, le=2**31 - 1)
    name: Text
    memory_bytes: int = Field(ge=0, le=2**62)
    compute_capability: str | list[Annotated[int, Field(ge=0, le=1000)]] | None = None


class EngineState(BaseModel):
    """Whether an engine works on the node, and if not why."""

    model_config = _STRICT

    ok: bool
    reasons: list[str] = []
    version: str | None = None


class RegisterRequest(BaseModel):
    """A worker describes its machine."""

    model_config = _STRICT

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
    boot_id: Text
    hostname: Text
    version: Text
    device_kinds: list[Literal["cpu", "cuda"]]
    cpu_slots: int = Field(ge=0, le=4096)
    gpus: list[Gpu] = []
    engines: dict[str, EngineState] = {}
    roots: list[Text] = []
    private_roots: bool = False
    artifact_url: Text | None = None


class RegisterAnswer(BaseModel):
    """Which queue to consume and how often to be heard."""

    node_id: str
    queue: str
    heartbeat_interval_seconds: int


class NodeHeartbeatRequest(BaseModel):
    """The node's worker lives; the attempts whose supervisors it sees alive."""

    model_config = _STRICT

    active_attempts: list[str] = Field(
        default=[], max_length=10_000, description="of these the answer names none in `placed`"
    )
    stopping: bool = Field(
        default=False,
        description="the node shuts down: it counts as gone until it is heard without this",
    )
    removed: list[Text] = Field(
        default=[],
        max_length=10_000,
        description="leftovers of earlier answers that are gone from its store",
    )


class PlacedAttempt(BaseModel):
    """An attempt that was placed on the node and is not claimed."""

    attempt_id: str
    job_id: str
    attempt: int


class LeftoverOrder(BaseModel):
    """A folder in the node's artifact store that is to go, but for the files in `keep`."""

    id: str
    url: str
    keep: list[str] = Field(description="paths below the folder")


class NodeHeartbeatAnswer(BaseModel):
    """Whether the node should go on taking attempts."""

    wanted: Literal["run", "drain"]
    placed: list[PlacedAttempt] = Field(
        default=[],
        description="attempts whose message the node should have had by now: it starts them itself",
    )
    leftovers: list[LeftoverOrder] = []


class NodeObject(BaseModel):
    """A node as readers see it."""

    id: str
    name: str
    hostname: str
    version: str
    live: bool = Field(description="heard within the heartbeat's time to live")
    wanted: str = Field(description="run, or drain: it is given no more jobs")
    device_kinds: list[str]
    cpu_slots: int
    cpu_slots_used: int
    gpus: list[dict[str, Any]]
    gpus_used: list[int] = Field(description="indices of GPUs that attempts hold")
    engines: dict[str, EngineState]
    roots: list[str]
    private_roots: bool
    artifact_url: str | None
    registered_at: datetime
    last_heartbeat_at: datetime
    unreachable_since: datetime | None
    quarantined_since: datetime | None = Field(
        description="since when it is set aside for repeated faults: it is given no jobs"
    )
    quarantine_detail: str | None


class NodeList(BaseModel):
    """Every registered node, by name."""

    items: list[NodeObject]
